"""Artifacts in a folder: of this machine, or one that all machines share.

Called through `store.open_store` and `store.fetch`. What is in the folder are plain files under their names; there is
no index, so that people may copy and remove files with their own tools.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from gpuflow.artifacts.marking import mark_used
from gpuflow.artifacts.partial import PartFile, disk_errors, has_content
from gpuflow.artifacts.receiving import Meter, copy_blocks, receive_by
from gpuflow.artifacts.source_file import open_source
from gpuflow.artifacts.store import RESERVED_PREFIX, Progress, StoredFile, Throttle, check_name, check_prefix
from gpuflow.errors import ArtifactError

#: Not there on Windows: O_NONBLOCK and O_CLOEXEC.
_FOLDER_FLAGS: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
#: Where Linux gives access to what this process has open, by the numbers of its descriptors.
_OPEN_FOLDERS: Final = Path("/proc/self/fd")
_OPEN_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class LocalStore:
    """Files below `root`, which is made when the first one is stored."""

    def __init__(self, root: Path, *, throttle: Throttle) -> None:
        self.root = root
        self._throttle = throttle

    def put(self, source: Path, name: str, *, progress: Progress | None = None) -> StoredFile:
        """Copy a file into the folder. The source may be the stored file itself. Raises ArtifactError."""
        meter = Meter(progress)
        with (
            disk_errors(f"{name} cannot be stored in {self.root}"),
            open_source(source) as stream,
            self._target(name) as target,
        ):
            before = os.fstat(stream.fileno())
            size = before.st_size
            digest = _digest_if_equal(stream, target, size)
            if digest is None:
                with PartFile(target, "put", resume=False) as part:
                    try:
                        copy_blocks(stream, part, self._throttle, meter)
                        _check_unchanged(stream, before, part.size, source)
                        part.commit()
                    except BaseException:  # a put begins anew the next time
                        part.discard()
                        raise
                    size, digest = part.size, part.sha256
            else:
                # The folder, which retention looks at too: at another time the file would be another version.
                mark_used(target.parent)
            meter.reached(size)
        return StoredFile(name=name, size=size, sha256=digest, url=self.url(name))

    def get(
        self, name: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None
    ) -> StoredFile:
        """Copy a file out of the folder. Raises ArtifactError."""
        path = self._path(name)
        found = fetch_path(path, target, throttle=self._throttle, sha256=sha256, progress=progress)
        return StoredFile(name=name, size=found.size, sha256=found.sha256, url=self.url(name))

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files of `prefix`, without digests; links and unfinished files are left out."""
        with disk_errors(f"{self.root} cannot be listed"):
            found = [
                StoredFile(name=name, size=size, sha256="", url=self.url(name)) for name, size in self._entries(prefix)
            ]
        return sorted(found, key=lambda file: file.name)

    def delete(self, prefix: str) -> int:
        """Delete the files of `prefix` and the folders that this leaves empty. Raises ArtifactError."""
        with disk_errors(f"{prefix or 'all'} cannot be deleted in {self.root}"):
            names = [name for name, _ in self._entries(prefix)]
            for name in names:
                path = self.root / name
                path.unlink(missing_ok=True)
                for parent in path.parents:
                    if parent == self.root:
                        break
                    with contextlib.suppress(OSError):  # not empty
                        parent.rmdir()
        return len(names)

    def url(self, name: str) -> str:
        """Return the file: URL of a name."""
        return (self.root.absolute() / check_name(name)).as_uri()

    def _path(self, name: str) -> Path:
        """Return the place of a name; a link on the way must not lead out of the folder."""
        path = self.root / check_name(name)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise self._leads_out(name)
        return path

    @contextlib.contextmanager
    def _target(self, name: str) -> Iterator[Path]:
        """Give the place where a file is put, in a folder that is there.

        On Linux by the open folder, of which it is known where it is: tasks may write to a folder that the operator
        has opened for results, and nothing is put elsewhere though one of them exchanges folders for links meanwhile.
        """
        path = self._path(name)
        if not _OPEN_FOLDERS.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path
            return
        self.root.mkdir(parents=True, exist_ok=True)
        root = self.root.resolve()
        descriptor = os.open(root, _FOLDER_FLAGS)
        try:
            for part in Path(name).parts[:-1]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
                deeper = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
                if not (_OPEN_FOLDERS / str(descriptor)).readlink().is_relative_to(root):
                    raise self._leads_out(name)
            yield _OPEN_FOLDERS / str(descriptor) / path.name
        finally:
            os.close(descriptor)

    def _leads_out(self, name: str) -> ArtifactError:
        return ArtifactError(f"{name!r} leads out of {self.root} by a link; remove the link")

    def _entries(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield name and size of the plain files of a prefix. Raises OSError for a folder that cannot be read."""
        begin = check_prefix(prefix)
        top = self._path(begin) if begin else self.root
        walk = _walk(top)
        for folder, files in [(str(top.parent), [top.name])] if begin and not top.is_dir() else walk:
            for file in files:
                path = Path(folder, file)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode) and not file.startswith(RESERVED_PREFIX):
                        yield path.relative_to(self.root).as_posix(), found.st_size


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder and its files, but for the folders of gpuflow's own unfinished files."""
    for folder, folders, files in os.walk(top, onerror=_unless_gone):
        folders[:] = [name for name in folders if not name.startswith(RESERVED_PREFIX)]
        yield folder, files


def _unless_gone(error: OSError) -> None:
    """Let os.walk go on past what somebody has deleted meanwhile, and stop at any other trouble."""
    if not isinstance(error, FileNotFoundError):
        raise error


def fetch_path(
    source: Path, target: Path, *, throttle: Throttle, sha256: str | None, progress: Progress | None
) -> StoredFile:
    """Copy one file of this machine to `target`, as `Store.get` does. Raises ArtifactError."""
    meter = Meter(progress)
    with disk_errors(f"{source.name} cannot be fetched to {target}"), _open(source) as stream:
        now = os.fstat(stream.fileno())
        if has_content(target, sha256, now.st_size):
            size, digest = now.st_size, str(sha256).lower()
            meter.reached(size)
        else:
            size, digest = receive_by(
                lambda part: copy_blocks(stream, part, throttle, meter),
                target,
                source_id=f"{source} {now.st_size} {now.st_mtime_ns}",
                size=now.st_size,
                sha256=sha256,
                meter=meter,
            )
    return StoredFile(name=source.name, size=size, sha256=digest, url=source.absolute().as_uri())


@contextlib.contextmanager
def _open(source: Path) -> Iterator[BinaryIO]:
    """Open a plain file; a pipe or device would never end."""
    try:
        descriptor = os.open(source, _OPEN_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{source} is not there; store it first, or give this machine the folder that holds it"
        ) from None
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtifactError(f"{source} is no plain file; pack a folder into an archive first")
        yield stream


def _check_unchanged(stream: BinaryIO, before: os.stat_result, copied: int, source: Path) -> None:
    """Refuse what may be a mixture: the source was written to while it was copied. Raises ArtifactError."""
    now = os.fstat(stream.fileno())
    if (now.st_size, now.st_mtime_ns, copied) != (before.st_size, before.st_mtime_ns, before.st_size):
        raise ArtifactError(f"{source} changed while it was stored; store it when nothing writes to it any more")


def _digest_if_equal(stream: BinaryIO, other: Path, size: int) -> str | None:
    """Return the digest of `stream` when the file `other` has the same bytes; it ends at the first difference."""
    if not other.is_file() or other.stat().st_size != size:
        return None
    digest = hashlib.sha256()
    with other.open("rb", buffering=0) as there:
        while block := stream.read(1 << 20):
            if there.read(len(block)) != block:
                return None
            digest.update(block)
    return digest.hexdigest()
