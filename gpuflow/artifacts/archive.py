"""Packs a folder into a reproducible .tar.gz or .tar.zst, and unpacks archives that nobody vouches for.

Called by the worker and the client. The same files give the same bytes: members are sorted, and owners, times, modes
and the compressor's header are fixed. What an archive may hold is decided in `extraction`.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal

from gpuflow.artifacts.extraction import Limits, extract
from gpuflow.artifacts.partial import disk_errors
from gpuflow.errors import ArtifactError
from gpuflow.private_files import open_new
from gpuflow.process_guard import process_umask

Compression = Literal["gzip", "zstd"]
SUFFIXES: Final[dict[Compression, str]] = {"gzip": ".tar.gz", "zstd": ".tar.zst"}
#: Weights hardly compress, so the fastest levels.
GZIP_LEVEL: Final = 1
ZSTD_LEVEL: Final = 1
_ZSTD_MODULE: Final = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
#: First bytes of the formats that are read.
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_TAR_MAGIC: Final = b"ustar"
_TAR_MAGIC_AT: Final = 257
#: What gzip, zlib and tarfile raise for bytes that are no archive.
_CORRUPT: Final = (tarfile.TarError, EOFError, zlib.error, ValueError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An archive that was written: its size in bytes and its SHA-256 in hex."""

    size: int
    sha256: str


def pack(folder: Path, archive: Path, *, leave_out: Collection[str] = ()) -> Packed:
    """Write `folder` to `archive` (members under the folder's name); the archive appears by rename.

    `leave_out` are names of files and folders, at whatever depth, that do not come in. A name that ends in .zst is
    compressed by zstd, any other by gzip. Raises ArtifactError for what no archive should hold (links out of the
    folder, pipes, devices) and for what the disk refuses.
    """
    fresh = archive.with_name(f".{archive.name}.new")
    try:
        with disk_errors(f"{archive.name} cannot be packed"), open_new(fresh) as raw:
            packed = pack_into(
                folder, raw, compression="zstd" if archive.suffix == ".zst" else "gzip", leave_out=leave_out
            )
            raw.flush()
            os.fsync(raw.fileno())
        with disk_errors(f"{archive.name} cannot be packed"):
            fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    return packed


def pack_into(
    folder: Path, stream: IO[bytes], *, compression: Compression = "gzip", leave_out: Collection[str] = ()
) -> Packed:
    """Write the archive of `folder` to a stream while it is built: the stream need not seek, and memory is constant.

    Raises ArtifactError as `pack` does, OSError from the disk and the stream.
    """
    root = folder.resolve()
    hashing = _Hashing(stream)
    with (
        _compressor(hashing, compression) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if not path.is_symlink() and path.is_dir():
                continue
            if leave_out and not frozenset(leave_out).isdisjoint(path.relative_to(folder).parts):
                continue
            _check_source(path, root)
            tar.inodes.clear()  # type: ignore[attr-defined]  # two links to one file are two files, as copies would be
            tar.add(path, arcname=f"{folder.name}/{path.relative_to(folder)}", recursive=False, filter=_anonymous)
            tar.members.clear()  # type: ignore[attr-defined]
    return Packed(size=hashing.size, sha256=hashing.hash.hexdigest())


class _Hashing(io.RawIOBase):
    """Passes what is written on to a stream, and hashes it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.hash, self.size = stream, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, block: Any, /) -> int:
        self._stream.write(block)
        self.hash.update(block)
        self.size += len(block)
        return len(block)


def _check_source(path: Path, root: Path) -> None:
    if path.is_symlink():
        try:
            inside = not path.readlink().is_absolute() and path.resolve().is_relative_to(root)
        except RuntimeError:  # a circle of links
            inside = False
        if not inside:
            raise ArtifactError(f"{path} is a link that leads out of its folder or nowhere; put the file itself there")
    elif not path.is_file():
        raise ArtifactError(f"{path} is neither a file nor a folder, and cannot be packed; remove it")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def _zstd() -> Any:
    try:
        return importlib.import_module(_ZSTD_MODULE)
    except ImportError as error:
        raise ArtifactError("zstd needs a library that is not here; run pip install 'gpuflow[zstd]'") from error


def _compressor(stream: _Hashing, compression: Compression) -> contextlib.AbstractContextManager[Any]:
    if compression == "zstd":
        return contextlib.closing(_zstd().ZstdFile(stream, "w", level=ZSTD_LEVEL))
    return gzip.GzipFile(filename="", mode="wb", fileobj=stream, compresslevel=GZIP_LEVEL, mtime=0)


def fresh_folder(target: Path) -> Path:
    """Make the folder beside `target` in which it is unpacked. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", dir=target.parent))


def unpack(
    archive: Path,
    target: Path,
    *,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    fresh: Path | None = None,
) -> None:
    """Unpack an untrusted archive into the new folder `target`, which appears by rename when all of it is there.

    `fresh` is an empty `fresh_folder`, for a caller who removes it whatever becomes of this process.

    Read are tar, tar.gz and tar.zst, whatever the name. Raises ArtifactError for what is no archive, is cut or
    corrupt, holds more than plain files, folders and links inside it, names one place twice, or exceeds `limits`;
    OSError from the disk.
    """
    fresh = fresh_folder(target) if fresh is None else fresh
    try:
        with disk_errors(f"{archive.name} cannot be unpacked"), _opened(archive) as stream:
            extract(stream, fresh, limits, archive.stat().st_size)
        fresh.chmod(0o777 & ~process_umask())
        fresh.rename(target)
    except _CORRUPT as error:
        raise ArtifactError(f"{archive.name} cannot be unpacked: {error}; make it again") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[BinaryIO]:
    """Open what an archive unzips to, by its first bytes."""
    with archive.open("rb") as raw:
        head = raw.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
        raw.seek(0)
        if head.startswith(_GZIP_MAGIC):
            try:
                with gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
                    yield unzipped  # type: ignore[misc]
            except gzip.BadGzipFile as error:
                raise tarfile.ReadError(str(error)) from error
        elif head.startswith(_ZSTD_MAGIC):
            zstd = _zstd()
            try:
                with zstd.ZstdFile(raw, "r") as unzipped:
                    yield unzipped
            except zstd.ZstdError as error:
                raise tarfile.ReadError(str(error)) from error
        elif head[_TAR_MAGIC_AT:] == _TAR_MAGIC:
            yield raw
        else:
            raise tarfile.ReadError("it is no tar, tar.gz or tar.zst")
