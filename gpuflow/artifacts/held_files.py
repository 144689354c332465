"""Holds files of a folder that a task may change, in a folder that it may not change, by hard links.

Called by the worker, which stores what a task leaves with rights of its own. Between the look at a file and the moment
when it is read, a task that lives can put a link in its place; what is held cannot be exchanged any more. Folders are
walked by descriptors and links are never followed. The files are opened with the rights of the task (`rights`), so
that none is held that the task could not have read itself. Where the disk makes no hard link, the file is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.store import RESERVED_PREFIX, Progress
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.terminal import log_value

log = get_logger("gpuflow.held_files")

#: A context in which this thread has the rights of the task whose files are opened.
Rights = Callable[[], AbstractContextManager[Any]]

#: Each level of folders keeps a descriptor open.
MAX_DEPTH: Final = 32
#: Links that lead to links.
_MAX_LINKS: Final = 8
_COPY_BYTES: Final = 1 << 20
#: Not there on Windows, where no worker runs.
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_PLAIN: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_FOLDER: Final = _PLAIN | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW
#: A pipe is opened without waiting for whoever writes to it.
_FILE: Final = _PLAIN | getattr(os, "O_NONBLOCK", 0) | _NO_FOLLOW
#: Another file system, another owner, or a file system without hard links.
_NO_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@contextlib.contextmanager
def aside(folder: Path, number: int) -> Iterator[Path]:
    """Make a folder below `folder` for what is held of attempt `number`, and remove it in the end. Raises OSError."""
    prefix = f"{_of(number)}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def forget_held(folder: Path, *, below: int) -> None:
    """Remove what attempts under `below` have left in `folder`: their worker was killed while it held files."""
    for path in folder.glob(f"{RESERVED_PREFIX}held-*"):
        number = path.name.split("-")[2]
        if number.isdecimal() and int(number) < below:
            shutil.rmtree(path, ignore_errors=True)


def _of(number: int) -> str:
    return f"{RESERVED_PREFIX}held-{number}"


def hold_tree(
    base: Path,
    inside: Sequence[str],
    target: Path,
    *,
    last: str = "",
    leave_out: Callable[[str], bool] = lambda _: False,
    links: bool = True,
    copies: bool = False,
    rights: Rights = contextlib.nullcontext,
    progress: Progress | None = None,
) -> None:
    """Hold all files of the folder `base/inside[0]/inside[1]/...` in the new folder `target`; the file `last` is last.

    Entries for whose names `leave_out` holds are left out, at whatever depth. A link to a file of the folder becomes
    that file; without `links`, links are left out. With `copies` no hard link is made, which could be
    written to. `progress` is called again and again; what it raises ends the work. Raises FileNotFoundError for what
    has been removed meanwhile, ArtifactError for a link out of the folder, a link to a folder, a pipe, a device, and
    folders too deep; OSError.
    """
    holder = _Holder(target, rights, progress, copies=copies)
    with holder.below(base, inside) as folder:
        holder.tree(folder, "", lambda name: name == last or leave_out(name.rpartition("/")[2]), links=links)
        holder.links(str(base.joinpath(*inside)))
        if last:
            holder.file(folder, last, last)


def hold_files(
    base: Path, inside: Sequence[str], names: Iterable[str], target: Path, *, rights: Rights = contextlib.nullcontext
) -> None:
    """Hold the files `names` ("/"-separated) of a folder in the new folder `target`, as `hold_tree` does with all.

    Raises ArtifactError for what has gone, is no plain file or lies behind a link; OSError.
    """
    holder = _Holder(target, rights, None)
    with holder.below(base, inside) as folder:
        for name in dict.fromkeys(names):
            *folders, file = name.split("/")
            try:
                with holder.below(folder, folders) as parent:
                    target.joinpath(*folders).mkdir(parents=True, exist_ok=True)
                    holder.file(parent, file, name)
            except FileNotFoundError:
                raise ArtifactError(
                    f"{log_value(name)} was removed before it could be stored; leave it where it is"
                ) from None


class _Holder:
    """Puts files into `target`, and remembers the links that it finds."""

    def __init__(self, target: Path, rights: Rights, progress: Progress | None, *, copies: bool = False) -> None:
        self._target, self._rights, self._progress = target, rights, progress
        self._copies = copies
        self._held: set[str] = set()
        self._links: dict[str, str] = {}
        target.mkdir(parents=True)

    @contextlib.contextmanager
    def below(self, base: Path | int, names: Sequence[str]) -> Iterator[int]:
        """Open a folder step by step from `base` on, a path or a descriptor; give its descriptor."""
        descriptor = os.dup(base) if isinstance(base, int) else os.open(base, _FOLDER)
        try:
            for name in names:
                deeper = _open(name, _FOLDER, descriptor)
                os.close(descriptor)
                descriptor = deeper
            yield descriptor
        finally:
            os.close(descriptor)

    def tree(self, folder: int, inside: str, is_left_out: Callable[[str], bool], *, links: bool) -> None:
        """Hold what is in an open folder, whose path in the tree is `inside`; without `links`, no links."""
        if inside.count("/") >= MAX_DEPTH:
            raise ArtifactError(f"{self._target.name} has folders below folders {MAX_DEPTH} deep; store it flatter")
        with os.scandir(folder) as entries:
            kinds = [(entry.name, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_link, is_folder in sorted(kinds):
            name = f"{inside}{entry}"
            if is_left_out(name) or (is_link and not links):
                continue
            if is_link:
                self._links[name] = os.readlink(entry, dir_fd=folder)
            elif is_folder:
                (self._target / name).mkdir()
                with self.below(folder, [entry]) as deeper:
                    self.tree(deeper, f"{name}/", is_left_out, links=links)
            else:
                self.file(folder, entry, name)

    def links(self, folder: str) -> None:
        """Hold the files to which the links lead, all in this tree; `folder` is where it is for who follows them."""
        for link in self._links:
            name = link
            for _ in range(_MAX_LINKS):
                if name not in self._links:
                    break
                leads = self._links[name].removeprefix(f"{folder}/")
                name = posixpath.normpath(posixpath.join(posixpath.dirname(name), leads))
            if name not in self._held:
                raise _a_link(link)
            try:
                os.link(self._target / name, self._target / link)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                shutil.copyfile(self._target / name, self._target / link)

    def file(self, folder: int, entry: str, name: str) -> None:
        """Hold the file `entry` of an open folder under `name`."""
        if self._progress is not None:
            self._progress(0)
        target = self._target / name
        with self._rights():
            descriptor = _open(entry, _FILE, folder)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ArtifactError(f"{log_value(name)} is no plain file, so it is not stored; write a file")
            if self._copies:
                self._copy(descriptor, target)
                self._held.add(name)
                return
            try:
                os.link(entry, target, src_dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                log.debug("file_copied_aside", name=name, cause=str(error))
                self._copy(descriptor, target)
            else:
                if not os.path.samestat(target.lstat(), state):
                    target.unlink()
                    raise ArtifactError(
                        f"{log_value(name)} was exchanged while it was stored; leave complete files as they are"
                    )
        finally:
            os.close(descriptor)
        self._held.add(name)

    def _copy(self, descriptor: int, target: Path) -> None:
        with target.open("xb", buffering=0) as copy:
            while block := os.read(descriptor, _COPY_BYTES):
                copy.write(block)
                if self._progress is not None:
                    self._progress(len(block))


def _open(name: str, flags: int, folder: int) -> int:
    """Open an entry of a folder. Raises ArtifactError where a link is."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _a_link(name) from None
        raise


def _a_link(name: str) -> ArtifactError:
    return ArtifactError(
        f"{log_value(name)} is a link, or lies behind one, to a folder or out of what is stored; "
        "put the files themselves there"
    )
