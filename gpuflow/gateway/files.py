"""The results folder as the HTTP API sees it: names become paths inside it, files have digests, lists are by name.

Called by the results routes, in threads. It knows no HTTP but its problems, and never leaves the folder of a task:
names are checked, and a link counts only where it leads to a file of the same task.

Beside the tasks stands `.gpuflow-gateway/`: `parts/` holds what has not come in whole, `digests/` the SHA-256 of files
as they were when it was taken.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.artifacts.store import RESERVED_PREFIX, check_name
from gpuflow.errors import ArtifactError
from gpuflow.gateway.problems import Problem

_OWN_FOLDER: Final = f"{RESERVED_PREFIX}gateway"
_BLOCK_BYTES: Final = 1 << 20
#: Tasks that one search decides upon, and how many of them at once.
MOST_DECIDED: Final = 5000
_CHUNK: Final = 200
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_FOLDER: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW
#: Without O_NONBLOCK a named pipe would hold us for ever.
_FILE: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_FOLLOW
#: What opening says of a place that is not there, or has become a link since it was looked at.
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored file: its name below the task, bytes, time of change (seconds), SHA-256 ("" while not known)."""

    task_id: str
    name: str
    size: int
    mtime: float
    sha256: str


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file that is open for reading, as it is now; `descriptor` is the caller's to close."""

    descriptor: int
    size: int
    mtime_ns: int
    sha256: str

    @property
    def etag(self) -> str:
        """Return the strong entity tag."""
        return f'"{self.sha256}"' if self.sha256 else f'"{self.mtime_ns:x}-{self.size:x}"'


class ResultsFolder:
    """Files by task and name below `root`."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()

    def place(self, task_id: str, name: str) -> Path:
        """Return the path of a name, whether it exists or not. Raises Problem 400, 404 for what leads elsewhere."""
        if "/" in task_id:
            raise Problem(400, "bad-name", "a task id holds no '/'; use the id as it was given")
        try:
            check_name(f"{task_id}/{name}")
        except ArtifactError as error:
            raise Problem(400, "bad-name", str(error)) from None
        path = self.root / task_id / name
        if not self._inside(path.parent, task_id):
            raise _missing(name)
        return path

    def open(self, task_id: str, name: str, *, digest: bool = False, digest_of_size: int | None = None) -> OpenFile:
        """Open a file. Its SHA-256, where not known, is taken with `digest`, or if it has `digest_of_size` bytes.

        Raises Problem 400, 404, OSError.
        """
        path = self.place(task_id, name)
        if not self._inside(path, task_id):
            raise _missing(name)
        try:
            place = path.resolve(strict=True)  # links inside of the task are followed here, and by nothing after this
            with self._folder(place.parent) as folder:
                descriptor = os.open(place.name, _FILE, dir_fd=folder)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NOT_THERE:
                raise
            raise _missing(name) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _missing(name)
            sha256 = self.known_digest(task_id, name, found)
            if not sha256 and (digest or found.st_size == digest_of_size):
                sha256 = _sha256(descriptor, found.st_size)
                self.keep_digest(task_id, name, found, sha256)
            return OpenFile(descriptor=descriptor, size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=sha256)
        except BaseException:
            os.close(descriptor)
            raise

    def entries(self, task_id: str) -> list[Entry]:
        """Return the files of a task by name. Raises Problem 400."""
        try:
            check_name(task_id)
        except ArtifactError as error:
            raise Problem(400, "bad-name", str(error)) from None
        folder = self.root / task_id
        if "/" in task_id or not self._inside(folder, task_id):
            return []
        return sorted(self._walk(folder, task_id), key=lambda entry: entry.name)

    def search(
        self, prefix: str, *, after: str, limit: int, only: Callable[[Sequence[str]], Collection[str]] | None = None
    ) -> tuple[list[Entry], str | None]:
        """Return the first `limit` files of all tasks that are, or lie below, `prefix`, and come after `after`.

        Both are spelled `task/name`. `only` returns those of some tasks that are looked at; with it, a search ends
        after MOST_DECIDED tasks. The second value is the `after` of what follows, None: there is no more. It names no
        task that `only` leaves out, but the beginning of an id. Order: by task, then by name.
        """
        task_id, _, below = prefix.removesuffix("/").partition("/")
        start = tuple(after.split("/", 1)) if after else ()
        tasks = [task for task in ([task_id] if task_id else self._tasks()) if (task,) >= start[:1]]
        decided = tasks if only is None else tasks[:MOST_DECIDED]
        found: list[Entry] = []
        for first in range(0, len(decided), _CHUNK):
            chunk = decided[first : first + _CHUNK]
            seen = chunk if only is None else only(chunk)
            for task in chunk:
                for entry in self.entries(task) if task in seen else ():
                    if (task, entry.name) > start and (not below or f"{entry.name}/".startswith(f"{below}/")):
                        if len(found) == limit:
                            return found, f"{found[-1].task_id}/{found[-1].name}"
                        found.append(entry)
        return found, _between(tasks[len(decided) - 1], tasks[len(decided)]) if len(decided) < len(tasks) else None

    def _tasks(self) -> list[str]:
        return sorted(
            item.name for item in self.root.iterdir() if item.is_dir() and not item.name.startswith(RESERVED_PREFIX)
        )

    def delete(self, task_id: str, name: str) -> None:
        """Remove a file and the folders that it leaves empty. Raises Problem 400, 404, OSError."""
        path = self.place(task_id, name)
        if not path.is_symlink() and not path.is_file():
            raise _missing(name)
        try:
            with self._folder(path.parent.resolve(strict=True)) as parent:
                os.unlink(path.name, dir_fd=parent)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            raise _missing(name) from None
        self._digest_path(task_id, name).unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:
                return

    def part_path(self, task_id: str, name: str, sha256: str | None) -> Path:
        """Return where a file comes in: one place for each name and content, a new one where that is not known."""
        mark = hashlib.sha256(name.encode()).hexdigest()[:32]
        return self.parts / task_id / f"{mark}.{sha256 or secrets.token_hex(16)}.part"

    @property
    def parts(self) -> Path:
        """Return the folder of what has not come in whole."""
        return self.root / _OWN_FOLDER / "parts"

    def known_digest(self, task_id: str, name: str, found: os.stat_result) -> str:
        """Return the digest taken of a file as it is; "" where none was."""
        try:
            kept = json.loads(self._digest_path(task_id, name).read_text("ascii"))
        except (OSError, ValueError):
            return ""
        same = kept.get("state") == _state(found)
        return str(kept.get("sha256", "")) if same else ""

    def keep_digest(self, task_id: str, name: str, found: os.stat_result, sha256: str) -> None:
        """Keep the digest of a file as it is. A disk that refuses costs only time, later."""
        path = self._digest_path(task_id, name)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps({"sha256": sha256, "state": _state(found)}), "ascii")
            fresh.replace(path)

    def _digest_path(self, task_id: str, name: str) -> Path:
        return self.root / _OWN_FOLDER / "digests" / task_id / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    @contextlib.contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        """Open a folder below the root step by step, through no link: a task may change one for a link meanwhile.

        Raises OSError, ValueError for a path that is not below.
        """
        parts = path.relative_to(self.root).parts
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            for part in parts:
                deeper = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
            yield descriptor
        finally:
            os.close(descriptor)

    def _inside(self, path: Path, task_id: str) -> bool:
        """Whether a path leads, through all links, to a place in the folder of its task."""
        try:
            return path.resolve().is_relative_to(self.root / task_id)
        except (OSError, RuntimeError):  # links in a circle
            return False

    def _walk(self, folder: Path, task_id: str) -> Iterator[Entry]:
        for at, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(RESERVED_PREFIX)]
            for file in files:
                path = Path(at) / file
                name = path.relative_to(folder).as_posix()
                try:
                    check_name(name)
                    found = path.stat()
                except (ArtifactError, OSError):
                    continue
                if not stat.S_ISREG(found.st_mode) or (path.is_symlink() and not self._inside(path, task_id)):
                    continue
                yield Entry(
                    task_id=task_id,
                    name=name,
                    size=found.st_size,
                    mtime=found.st_mtime,
                    sha256=self.known_digest(task_id, name, found),
                )


def _between(last: str, following: str) -> str:
    """Return the shortest beginning of `following` that comes after `last`, the text before it in a sorted list."""
    return next(start for end in range(1, len(following) + 1) if (start := following[:end]) > last)


def _missing(name: str) -> Problem:
    return Problem(404, "no-such-file", f"there is no file {name!r} in the results of this task")


def _state(found: os.stat_result) -> list[int]:
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _sha256(descriptor: int, size: int) -> str:
    digest, at = hashlib.sha256(), 0
    while at < size and (block := os.pread(descriptor, _BLOCK_BYTES, at)):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()
