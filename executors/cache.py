"""The cache of prepared models and data sets: where it is, one preparer at a time, entries that appear whole.

Used by `modeling`, `data` and `models`. An entry is a folder or file under its final name only when it is complete.
Whoever uses one holds its lock, shared, until the process ends: `cache_trim` removes nothing that is held.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from executors.base import ExecutorError
from gpuflow.protocol import Emitter, Request

#: Folders of the cache whose entries are held while they are used, and removed when the cache is too large.
KINDS: Final = ("models", "checkpoints", "data", "references")

#: Fields of a preset that say something to people, or that count after it is prepared.
_DESCRIBING: Final = frozenset(
    {
        "name", "description", "licence", "parameters", "context_tokens", "size_bytes", "chat_template", "columns",
        "transformers",
    }
)  # fmt: skip
#: The descriptors of the locks of what this process uses, by their path; they end with it.
_held: Final[dict[Path, int]] = {}
_holding: Final = threading.Lock()


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


def hold(root: Path, name: str, *, exists: Callable[[], bool] = lambda: True) -> bool:
    """Hold the lock of an entry, shared, to the end of this process, and note its use; False if it is not there.

    Waits while another process prepares or removes it. A cache that may only be read is used without locks.
    """
    path = lock_path(root, name)
    try:
        with _open_lock(root, name) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not exists():
                return False
            with _holding:
                if path not in _held:
                    _held[path] = os.dup(file.fileno())  # the lock lasts as long as any copy is open
            os.utime(file.fileno())
    except OSError:
        return exists()
    return True


def release(root: Path, name: str) -> None:
    """Let go of an entry before the process ends."""
    with _holding:
        descriptor = _held.pop(lock_path(root, name), None)
    if descriptor is not None:
        os.close(descriptor)


def obtain(path: Path, make: Callable[[], None], emitter: Emitter) -> Path:
    """Return the entry `<root>/<kind>/<entry>`, made by `make` if it is not there, and held from now on."""
    root, name = path.parent.parent, lock_name(path)
    while not hold(root, name, exists=path.exists):
        with locked(root, name, emitter):
            if not path.exists():
                make()
    return path


def hold_inputs(request: Request) -> None:
    """Hold every entry of the cache that a request names by its path: checkpoints, adapters, files of data.

    Raises ExecutorError: CacheEntryGone (retryable: another attempt fetches it again).
    """
    root = cache_root(request.cache_dir)
    for text in _texts((request.checkpoint_path, request.spec)):
        if not text.startswith(f"{root}{os.sep}"):
            continue
        parts = Path(text).relative_to(root).parts
        if len(parts) < 2 or parts[0] not in KINDS or ".." in parts:
            continue
        entry = root / parts[0] / parts[1]
        if not hold(root, lock_name(entry), exists=entry.exists):
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
