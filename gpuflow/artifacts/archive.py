"""Packs a folder into a reproducible .tar.gz and unpacks archives that nobody vouches for.

The same files give the same bytes: members are sorted, and owners, times and the gzip header are fixed.
"""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from gpuflow.errors import ArtifactError

#: Weights hardly compress, so the fastest level.
GZIP_LEVEL: Final = 1
#: Most bytes and members that an archive may unpack to.
MAX_UNPACKED_BYTES: Final = 512 * 1024**3
MAX_MEMBERS: Final = 100_000
#: Arguments of `extract`: the filter where this Python has one.
_FILTER: Final[dict[str, Any]] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def pack(folder: Path, archive: Path) -> None:
    """Write `folder` to `archive` (members under the folder's name); the archive appears by rename. Raises OSError."""
    fresh = archive.with_name(f".{archive.name}.new")
    try:
        with (
            fresh.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in sorted(folder.rglob("*")):
                if path.is_dir() and not path.is_symlink():
                    continue
                tar.add(
                    path,
                    arcname=f"{folder.name}/{path.relative_to(folder)}",
                    recursive=False,
                    filter=_anonymous,
                )
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def unpack(archive: Path, target: Path) -> None:
    """Unpack an untrusted archive into the new folder `target`, which appears by rename when all of it is there.

    Raises ArtifactError for what is no archive, leaves its folder, holds links out of it or devices, or is too large.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with tarfile.open(archive, mode="r:*") as tar:
            _extract(tar, fresh)
        fresh.rename(target)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError) as error:
        raise ArtifactError(f"{archive.name} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    unpacked = 0
    for count, member in enumerate(tar, start=1):
        unpacked += member.size
        if count > MAX_MEMBERS or unpacked > MAX_UNPACKED_BYTES:
            raise ArtifactError(f"the archive holds more than {MAX_MEMBERS} files or {MAX_UNPACKED_BYTES} bytes")
        _vet(member, folder.resolve())
        tar.extract(member, folder, **_FILTER)


def _vet(member: tarfile.TarInfo, root: Path) -> None:
    """Refuse what would leave the folder or is no plain file, folder or link; clear owner and special bits.

    tarfile's own filter does much the same, but only from Python 3.11.4 on.
    """
    place = root / member.name
    leads_to = place
    if member.issym():
        leads_to = place.parent / member.linkname
    elif member.islnk():
        leads_to = root / member.linkname
    elif not member.isreg() and not member.isdir():
        raise ArtifactError(f"the archive holds {member.name!r}, which is neither a file nor a folder")
    if not all(path.resolve().is_relative_to(root) for path in (place, leads_to)):
        raise ArtifactError(f"the archive holds {member.name!r}, which leads out of its folder")
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
