"""The reader of archives: tar headers with their extensions, compressed or not."""

from __future__ import annotations

import gzip
import io
import random
import shutil
import tarfile
from typing import Any

from gpuflow.artifacts.archive import unpack
from gpuflow.artifacts.extraction import Limits
from gpuflow.errors import ArtifactError
from tests.fuzz.mutation import MOST_BYTES, Mutator
from tests.fuzz.reader import Reader
from tests.support.hostile_archives import endless_number, header, records

_NAMES = (
    "a",
    "a/b",
    "weights.bin",
    "../x",
    "/abs",
    "a//b",
    "./c",
    "é",
    "x" * 150,
    "a/b/c/d/e",
    "\x01",
    "a\\b",
    "a/../b",
)
_KINDS = (
    tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE,
    tarfile.CHRTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"\x00", b"9",
)  # fmt: skip
_LIMITS = Limits(max_bytes=4 << 20, max_members=200, free_ratio_bytes=1 << 20, max_depth=8)


def _member(rng: random.Random) -> bytes:
    member = tarfile.TarInfo(rng.choice(_NAMES))
    member.type = rng.choice(_KINDS) if rng.random() < 0.5 else tarfile.REGTYPE
    member.mode = rng.choice((0o644, 0o755, 0o7777, 0))
    content = rng.randbytes(rng.choice((0, 1, 511, 512, 513))) if member.type == tarfile.REGTYPE else b""
    member.size = rng.choice((len(content), len(content), len(content), 7, 2**33, 2**62))
    member.linkname = rng.choice(_NAMES)
    kind = rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    try:
        head = member.tobuf(kind)
    except ValueError:  # a name or a number that this format cannot hold
        head = member.tobuf(tarfile.GNU_FORMAT)
    return head + content + bytes(-len(content) % 512)


def _extension(rng: random.Random) -> bytes:
    kind = rng.choice((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"X"))
    name = rng.choice(("path", "linkpath", "size", "mtime", "uid", "hdrcharset", "GNU.sparse.map", "comment", "é"))
    value = rng.choice(("x", "9" * 300, "-1", "1e400", "nan", "BINARY", "../x", "a/" * 200, "\x00", "1" * 600))
    return header(kind, records(**{name: value}) if rng.random() < 0.8 else rng.randbytes(rng.randrange(600)))


class Archive(Reader):
    """What the reader process unpacks."""

    name = "archive headers"
    declared = (ArtifactError,)

    def made_of(self) -> Mutator:
        self.number = 0
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in ("model/config.json", "model/" + "n" * 120, "model/é"):
                member: Any = tarfile.TarInfo(name)
                member.size = 5
                tar.addfile(member, io.BytesIO(b"12345"))
        self.whole = whole.getvalue()
        short = self.whole.rstrip(b"\0") + bytes(1536)
        words = (b"ustar\x0000", b"ustar  \x00", b"0000644\x00", b"\x80" + bytes(7), b"\xff" * 8, b"30 mtime=1.5\n")
        corpus = (
            short,
            header(tarfile.XHDTYPE, records(path="x")) + short,
            header(tarfile.GNUTYPE_LONGNAME, b"n" * 300 + b"\0") + short,
            endless_number(600) + bytes(1024),
        )
        return Mutator(corpus, words=words)

    def make(self, rng: random.Random) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            data = self.mutator.content(rng)
        else:
            parts = [_extension(rng) if rng.random() < 0.4 else _member(rng) for _ in range(rng.choice((1, 2, 5)))]
            data = b"".join(parts) + bytes(1024)
            if kind == 1:  # a header with its sum made right again: a change that tarfile does not notice
                data = _repaired(self.mutator._changed(rng, data))
        packed = rng.randrange(8)
        if packed == 0:
            data = gzip.compress(data, 1, mtime=0)
        elif packed == 1:
            data = self.mutator._changed(rng, gzip.compress(data, 1, mtime=0))
        return data

    def grown(self, rng: random.Random, size: int) -> bytes:
        parts = [_extension(rng) if rng.random() < 0.5 else _member(rng) for _ in range(3)]
        if rng.random() < 0.5:
            unit = b"".join(parts)
            return (unit * (1 + size // len(unit)))[:size] + bytes(1024)
        kind = rng.choice((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME))
        piece = rng.choice((b"1", b"11 path=xy\n", b" ", b"=", b"a", b"9 a=b\n", b"30 mtime=1.5\n", b"\0"))
        return header(kind, piece * (size // len(piece))) + bytes(1024)

    def read(self, data: bytes) -> None:
        self.number += 1
        archive, target = self.folder / "a.tar", self.folder / "target"
        archive.write_bytes(data[:MOST_BYTES])
        try:
            unpack(archive, target, limits=_LIMITS)
            outside = [path for path in target.rglob("*") if not path.resolve().is_relative_to(target.resolve())]
            assert not outside, "a link leads out"
        finally:
            shutil.rmtree(target, ignore_errors=True)
        assert sorted(path.name for path in self.folder.iterdir()) == ["a.tar"], "something is left or lies outside"


def _repaired(data: bytes) -> bytes:
    """Return a tar whose first header has a right sum."""
    if len(data) < 512:
        return data
    block = data[:148] + b" " * 8 + data[156:512]
    return data[:148] + b"%06o\0 " % sum(block) + data[156:]
