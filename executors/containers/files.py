"""The folders of the requests of a session, in which a container writes the files of their results.

A container runs on after a request, and shares the folder of its requests with us. So the files are copied: what it
still has open of them is not part of the result. No link is followed, on whatever level it puts one meanwhile, and none
in place of the folder itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import Final

from gpuflow.protocol import RESULT_FILE

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: What the opening of a link, of a socket, and of a file that has gone again says.
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.ENOENT)


class RequestFolder:
    """The folder of a request of a process, which writes where it likes: the output folder of the task itself."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    @property
    def to_read(self) -> Path:
        """The path by which its files are read."""
        return self.path

    def bring(self, target: Path) -> list[str]:
        """Have its files in `target`; return the names of what is left out. Raises OSError."""
        return []

    def close(self) -> None:
        """Forget it."""


class SharedFolder(RequestFolder):
    """A folder of a request below one that a container can write to."""

    def __init__(self, shared: Path) -> None:
        path = shared / uuid.uuid4().hex
        path.mkdir()
        self.path = path
        self._descriptor = os.open(path, _FLAGS | os.O_DIRECTORY)

    @property
    def to_read(self) -> Path:
        """Its path by our descriptor: the folder as it was made, whatever stands in its place by now."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def bring(self, target: Path) -> list[str]:
        """Copy its files and folders into `target`; return the names of what is neither. Raises OSError."""
        left_out: list[str] = []
        for place, folders, files, descriptor in os.fwalk(".", dir_fd=self._descriptor, follow_symlinks=False):
            below = Path(place)
            (target / below).mkdir(parents=True, exist_ok=True)
            left_out += [str(below / name) for name in folders if _is_link(name, descriptor)]
            for name in files:
                if below == Path() and name == RESULT_FILE:
                    continue  # it is read already
                if not _copied(name, descriptor, target / below / name):
                    left_out.append(str(below / name))
        return left_out

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _copied(name: str, folder: int, target: Path) -> bool:
    """Copy a plain file; say whether it is one."""
    try:
        descriptor = os.open(name, _FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return False
    with os.fdopen(descriptor, "rb") as source:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            return False
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        target.chmod(0o644 | (mode & 0o111))
    return True
