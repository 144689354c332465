"""What an archive may hold, and where it goes: writes the members of a tar stream that nobody vouches for.

Called by `archive.unpack` with a new folder. Of tarfile only the reading of headers is used: files are made here, each
new, links last, so that nothing is ever written through a link.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from gpuflow.artifacts.tar_headers import CheckedMember, HeaderStream
from gpuflow.errors import ArtifactError

#: Most that is read at once.
_MAX_HEADER_BYTES: Final = 1 << 20
#: What Linux and macOS take at most as a part of a path, and well within what they take as a path.
_MAX_PART_BYTES: Final = 255
_MAX_NAME_BYTES: Final = 2048
_COPY_BYTES: Final = 1 << 20
#: Zeros may fill an archive up to its writer's record size.
_MAX_PADDING_BYTES: Final = 16 << 20
_REGULAR: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most that an archive may unpack to.

    Above `free_ratio_bytes`, it may not be more than `max_ratio` times the archive's own size: weights hardly
    compress, and gzip makes a bomb of 1 000 times.
    """

    max_bytes: int = 512 * 1024**3
    max_members: int = 100_000
    max_ratio: int = 200
    free_ratio_bytes: int = 64 * 1024**2
    max_depth: int = 64


class _Extraction:
    def __init__(self, folder: Path, limits: Limits, archive_bytes: int) -> None:
        self.folder = folder.resolve()
        self.limits = limits
        self.most_bytes = min(limits.max_bytes, max(limits.free_ratio_bytes, limits.max_ratio * archive_bytes))
        self.unpacked = self.members = 0
        self.files: dict[PurePosixPath, Path] = {}
        self.folders: set[PurePosixPath] = set()
        self.links: dict[PurePosixPath, str] = {}

    def add(self, member: tarfile.TarInfo, stream: HeaderStream) -> None:
        self._count(member)
        name = self._name(member.name, member)
        if name in self.files or name in self.links or name in self.folders:
            raise _refusal(member, "is there twice")
        if member.isdir():
            if name.parts:
                self.folders.add(name)
                self._make_folder(name, member)
        elif not name.parts:
            raise _refusal(member, "has no name")
        elif member.issym():
            self._make_folder(name.parent, member)
            self.links[name] = member.linkname
        elif member.islnk():
            self._make_hard_link(name, member)
        elif member.type in _REGULAR and not member.issparse():
            self._make_file(name, member, stream)
        else:
            raise _refusal(member, "is neither a plain file nor a folder nor a link")

    def _count(self, member: tarfile.TarInfo) -> None:
        self.members += 1
        if self.members > self.limits.max_members:
            raise ArtifactError(f"the archive holds more than {self.limits.max_members} files; split it")
        if member.size < 0 or (member.size and not member.isreg()):
            raise _refusal(member, f"claims {member.size} bytes")
        self.unpacked += member.size
        if self.unpacked > self.most_bytes:
            raise ArtifactError(
                f"the archive unpacks to more than {self.most_bytes} bytes, which is too much for its size; "
                "pass on the files themselves"
            )
        if member.size and member.size > shutil.disk_usage(self.folder).free:
            raise _refusal(member, f"claims {member.size} bytes, more than the disk has free")

    def _name(self, text: str, member: tarfile.TarInfo) -> PurePosixPath:
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            raise _refusal(member, "has a name that is not UTF-8") from None
        name = PurePosixPath(text)
        if name.is_absolute() or ".." in name.parts:
            raise _refusal(member, "leads out of its folder")
        if len(encoded) > _MAX_NAME_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in name.parts):
            raise _refusal(member, "has a name that is too long")
        if "\\" in text or any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise _refusal(member, "has a backslash or a control character in its name")
        if len(name.parts) > self.limits.max_depth:
            raise _refusal(member, f"lies deeper than {self.limits.max_depth} folders")
        return name

    def _make_folder(self, name: PurePosixPath, member: tarfile.TarInfo) -> None:
        for part in (*reversed(name.parents), name):
            if part in self.files or part in self.links:
                raise _refusal(member, f"lies below {str(part)!r}, which is no folder")
        (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _make_file(self, name: PurePosixPath, member: tarfile.TarInfo, stream: HeaderStream) -> None:
        self._make_folder(name.parent, member)
        path = self.folder / name
        mode = 0o755 if member.mode & 0o100 else 0o644
        with os.fdopen(self._create(path, mode, member), "wb", buffering=0) as file:
            stream.seek(member.offset_data)
            left = member.size
            while left:
                block = stream.read(min(_COPY_BYTES, left))
                if not block:
                    raise _refusal(member, f"claims {member.size} bytes, but {left} of them are missing")
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
                left -= len(block)
        self.files[name] = path

    def _create(self, path: Path, mode: int, member: tarfile.TarInfo) -> int:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, mode)
        except FileExistsError:
            raise _refusal(member, "is there twice") from None

    def _make_hard_link(self, name: PurePosixPath, member: tarfile.TarInfo) -> None:
        source = self.files.get(self._name(member.linkname, member))
        if source is None:
            raise _refusal(member, f"links to {member.linkname!r}, which is no file before it")
        self._make_folder(name.parent, member)
        try:
            (self.folder / name).hardlink_to(source)
        except FileExistsError:
            raise _refusal(member, "is there twice") from None
        self.files[name] = self.folder / name

    def finish(self) -> None:
        """Make the symbolic links, and refuse all when one of them leads out."""
        for name, to in self.links.items():
            path = self.folder / name
            if not to or "\0" in to or PurePosixPath(to).is_absolute() or not self._inside(path.parent / to):
                raise ArtifactError(f"the archive holds {str(name)!r}, a link that leads out of its folder")
            try:
                path.symlink_to(to)
            except FileExistsError:
                raise ArtifactError(f"the archive holds {str(name)!r} twice; make it again") from None
        for name in self.links:
            try:
                inside = (self.folder / name).resolve().is_relative_to(self.folder)
            except (RuntimeError, OSError):  # a circle of links
                inside = False
            if not inside:
                raise ArtifactError(f"the archive holds {str(name)!r}, a link that leads out of its folder")

    def _inside(self, path: Path) -> bool:
        return Path(os.path.normpath(path)).is_relative_to(self.folder)


def extract(stream: BinaryIO, folder: Path, limits: Limits, archive_bytes: int) -> None:
    """Write the members of a tar stream into the empty `folder`.

    Raises ArtifactError for what it refuses (some of it may then lie in `folder`, nothing outside), tarfile.TarError
    for what is no tar or is cut, OSError from the disk.
    """
    guarded = HeaderStream(stream, _MAX_HEADER_BYTES)
    going = _Extraction(folder, limits, archive_bytes)
    source: Any = guarded
    with tarfile.open(fileobj=source, mode="r:", tarinfo=CheckedMember) as tar:
        while (member := tar.next()) is not None:
            going.add(member, guarded)
            tar.members.clear()  # type: ignore[attr-defined]
        _check_end(guarded)
    going.finish()


def _check_end(stream: HeaderStream) -> None:
    """Read to the end, so that the compressor's own sum is checked; all of it must be zeros.

    tarfile takes a broken header for the end of the archive, and stops in silence.
    """
    if stream.last != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it is cut or corrupt")
    padding = 0
    while block := stream.read(_COPY_BYTES):
        padding += len(block)
        if block.count(0) != len(block) or padding > _MAX_PADDING_BYTES:
            raise tarfile.ReadError("there is something behind its end")


def _refusal(member: tarfile.TarInfo, cause: str) -> ArtifactError:
    return ArtifactError(f"the archive holds {member.name[:200]!r}, which {cause}; unpacking it is refused")
