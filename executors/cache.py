"""The cache of prepared models and data sets: where it is, one preparer at a time, entries that appear whole.

Used by `modeling`, `data` and `models`. An entry is a folder or file under its final name only when it is complete.
Whoever uses one holds its lock, shared, until the process ends, or the request that needs it (`Holds`): `cache_trim`
removes nothing that is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from executors.base import ExecutorError
from gpuflow.protocol import Emitter, Request

#: Folders of the cache whose entries are held while they are used, and removed when the cache is too large.
KINDS: Final = ("models", "checkpoints", "data", "references", "venvs")

#: Fields of a preset that say something to people, or that count after it is prepared.
_DESCRIBING: Final = frozenset(
    {
        "name", "description", "licence", "parameters", "context_tokens", "size_bytes", "chat_template", "columns",
        "transformers",
    }
)  # fmt: skip
#: How often one looks whether an entry that another prepares is there, in seconds.
_LOOK_SECONDS: Final = 0.1
#: The locks of what this process uses, by their path: the descriptor, and how many need it. They end with the process.
_held: Final[dict[Path, tuple[int, int]]] = {}
_holding: Final = threading.Lock()


class Holds:
    """What one request of several holds of the cache; safe in threads. Taking more is over once it is released."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._released = False
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """Keep a lock that `hold` has just taken for this request."""
        with self._lock:
            if not self._released:
                self._paths.append(path)
                return
        _let_go(path)

    def release(self) -> None:
        """Let go of all."""
        with self._lock:
            paths, self._paths, self._released = self._paths, [], True
        for path in paths:
            _let_go(path)


def cache_root(cache_dir: str | None) -> Path:
    """Return the cache folder: the request's, else $GPUFLOW_CACHE_DIR, else ~/.cache/gpuflow."""
    chosen = cache_dir or os.environ.get("GPUFLOW_CACHE_DIR")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "gpuflow"


def entry_name(name: str, preset: Mapping[str, Any]) -> str:
    """Return the name of a preset's entry; it changes with everything that decides the content."""
    recipe = {key: value for key, value in preset.items() if key not in _DESCRIBING}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:12]}"


@contextlib.contextmanager
def locked(root: Path, name: str, emitter: Emitter) -> Iterator[None]:
    """Hold the lock of entry `name`; waits, and says so, while another process prepares it. Raises OSError."""
    with _open_lock(root, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emitter.status("loading", f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def unused(root: Path, name: str) -> Iterator[bool]:
    """Hold the lock of an entry if nobody else does; gives False, and holds nothing, otherwise. Raises OSError."""
    with _open_lock(root, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def lock_path(root: Path, name: str) -> Path:
    """Return the lock file of an entry; its time of change is when the entry was last used."""
    return root / "locks" / f"{name}.lock"


def _open_lock(root: Path, name: str) -> IO[str]:
    path = lock_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+")  # a shared lock on NFS needs a file that is open for reading


def lock_name(path: Path) -> str:
    """Return the name of the lock of the entry at `path`."""
    return f"{path.parent.name}-{path.name}"


def hold(root: Path, name: str, *, exists: Callable[[], bool] = lambda: True, holds: Holds | None = None) -> bool:
    """Hold the lock of an entry, shared, and note its use; False if it is not there.

    Held as long as `holds`; without it, to the end of this process. Waits while another process prepares or removes the
    entry. A cache that may only be read is used without locks.
    """
    path = lock_path(root, name)
    try:
        with _open_lock(root, name) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not exists():
                return False
            with _holding:
                # The lock lasts as long as any copy of the descriptor is open.
                descriptor, count = _held.get(path) or (os.dup(file.fileno()), 0)
                _held[path] = descriptor, count + 1
            if holds is not None:
                holds.add(path)
            os.utime(file.fileno())
    except OSError:
        return exists()
    return True


def _let_go(path: Path) -> None:
    with _holding:
        descriptor, count = _held.pop(path)
        if count > 1:
            _held[path] = descriptor, count - 1
        else:
            os.close(descriptor)


def obtain(path: Path, make: Callable[[], None], emitter: Emitter, *, exists: Callable[[], bool] | None = None) -> Path:
    """Return the entry `<root>/<kind>/<entry>`, made by `make` if it is not there, and held from now on.

    `exists` says whether it is there, for one that does not appear whole by a rename.
    """
    root, name, is_there = path.parent.parent, lock_name(path), exists or path.exists
    told = False
    while not hold(root, name, exists=is_there):
        with unused(root, name) as mine:
            if mine and not is_there():
                make()
        if not mine:
            # Never waited for as its only user: a thread of this process may have made it, and holds it by now.
            if not told:
                emitter.status("loading", f"waiting for another process that prepares {name}")
            told = True
            time.sleep(_LOOK_SECONDS)
    return path


def hold_inputs(request: Request, holds: Holds | None = None) -> None:
    """Hold every entry of the cache that a request names by its path: checkpoints, adapters, files of data.

    As long as `holds`; without it, to the end of this process. Raises ExecutorError: CacheEntryGone (retryable: another
    attempt fetches it again).
    """
    root = cache_root(request.cache_dir)
    for text in _texts((request.checkpoint_path, request.spec)):
        if not text.startswith(f"{root}{os.sep}"):
            continue
        parts = Path(text).relative_to(root).parts
        if len(parts) < 2 or parts[0] not in KINDS or ".." in parts:
            continue
        entry = root / parts[0] / parts[1]
        if not hold(root, lock_name(entry), exists=entry.exists, holds=holds):
            raise ExecutorError("CacheEntryGone", f"{entry} was removed from the cache meanwhile", retryable=True)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Give an empty folder on the cache's own disk, so that a rename out of it is atomic; removed at the end."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
