"""Hostile archives: each is refused, and nothing of it stays, inside the folder or out of it."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuflow.artifacts.archive import Limits, unpack
from gpuflow.errors import ArtifactError

BLOCK = tarfile.BLOCKSIZE
LIMITS = Limits(max_bytes=50_000_000, max_members=50, max_depth=16, free_ratio_bytes=1_000_000)


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644, size: int = 3) -> bytes:
    """Return header and content of a member."""
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, link, mode
    found.size = size if kind in (tarfile.REGTYPE, tarfile.CONTTYPE) else 0
    return found.tobuf(tarfile.PAX_FORMAT) + padded(b"x" * found.size)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    """Return a header alone: what it claims need not follow."""
    found = tarfile.TarInfo(name)
    found.type, found.size = kind, size
    return found.tobuf(tarfile.GNU_FORMAT)


def pax(**fields: str) -> bytes:
    """Return an extended header that overrides fields of the next member."""
    records = b""
    for name, value in fields.items():
        body = f" {name}={value}\n".encode()
        length = len(body)
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        records += str(length).encode() + body
    return header(tarfile.XHDTYPE, len(records)) + padded(records)


END = bytes(2 * BLOCK)
LINK, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
SPARSE = pax(**{"GNU.sparse.size": "9", "GNU.sparse.map": "0,3", "GNU.sparse.numblocks": "1"})

HOSTILE: dict[str, bytes] = {
    "traversal": member("../out-of-it"),
    "traversal, deep": member("a/../../out-of-it"),
    "traversal that comes back": member("../x/out-of-it"),
    "traversal inside": member("a/../b"),
    "traversal by an extended header": pax(path="../out-of-it") + member("harmless"),
    "a folder outside": member("../folder", DIR),
    "absolute": member("/tmp/gpuflow-absolute"),
    "absolute with two slashes": member("//tmp/gpuflow-absolute"),
    "absolute by an extended header": pax(path="/tmp/gpuflow-absolute") + member("harmless"),
    "backslashes": member("..\\..\\out-of-it"),
    "a line feed in a name": member("a\nb"),
    "an escape sequence in a name": member("\x1b[2Jname"),
    "no name": member("."),
    "a name too long for the disk": member("n" * 5000),
    "a part too long for the disk": member("n" * 300),
    "too deep": member("/".join("d" * 40)),
    "a link to an absolute path": member("link", LINK, link="/etc/passwd"),
    "a link to the folder above": member("link", LINK, link=".."),
    "a link far above": member("a/b/link", LINK, link="../../../secret"),
    "a link to nothing": member("link", LINK, link=""),
    "a link by an extended header": pax(linkpath="../secret") + member("link", LINK, link="harmless"),
    "links that lead out together": member("a/b", LINK, link="../c/d") + member("c/d", LINK, link="../../secret"),
    "a link through a link": member("a/b/c/f")
    + member("d", LINK, link="a/b/c")
    + member("e", LINK, link="d/../../../.."),
    "a link through a link that climbs": member("a/b/c/f")
    + member("a/b/c/top", LINK, link="../../..")
    + member("out", LINK, link="a/b/c/top/.."),
    "a link to itself": member("link", LINK, link="link"),
    "a circle of links": member("a", LINK, link="b") + member("b", LINK, link="a"),
    "writing through a link": member("door", LINK, link="..") + member("door/out-of-it"),
    "writing through an inner link": member("in/f") + member("door", LINK, link="in") + member("door/f"),
    "a file over a link": member("door", LINK, link="harmless") + member("door"),
    "a link over a file": member("door") + member("door", LINK, link="harmless"),
    "a link over a folder": member("door/f") + member("door", LINK, link="harmless"),
    "a hard link out": member("link", HARD, link="../secret"),
    "a hard link to an absolute path": member("link", HARD, link="/etc/passwd"),
    "a hard link to nothing before it": member("link", HARD, link="later") + member("later"),
    "a hard link to a link": member("s", LINK, link="..") + member("h", HARD, link="s"),
    "a hard link to itself": member("h", HARD, link="h"),
    "a pipe": member("pipe", tarfile.FIFOTYPE),
    "a character device": member("device", tarfile.CHRTYPE),
    "a block device": member("device", tarfile.BLKTYPE),
    "an unknown kind": member("strange", b"Z"),
    "a sparse file": header(tarfile.GNUTYPE_SPARSE, 0),
    "a sparse file by an extended header": SPARSE + member("sparse"),
    "the same name twice": member("a") + member("a"),
    "the same name, spelt otherwise": member("a/b") + member("./a//b"),
    "the same folder twice": member("a", DIR) + member("a/", DIR),
    "a file that is a folder too": member("a") + member("a/b"),
    "a folder that is a file too": member("a/b") + member("a"),
    "too many members": b"".join(member(f"{number}", size=0) for number in range(60)),
    "more than the most bytes": header(tarfile.REGTYPE, 60_000_000),
    "more bytes than there are": header(tarfile.REGTYPE, 900_000) + b"short",
    "more bytes than the disk has": header(tarfile.REGTYPE, 1 << 62),
    "a size below zero": pax(size="-1024") + member("a"),
    "a size that is no number": pax(size="1e400") + member("a") + b"?" * BLOCK,
    "another size in the extended header": pax(size="900000") + member("a"),
    "a link with a size": pax(size="1024") + member("link", LINK, link="a"),
    "an extended header of a gigabyte": header(tarfile.XHDTYPE, 1 << 30),
    "an extended header of a size below zero": header(tarfile.GNUTYPE_LONGNAME, -512) + member("a"),
    "a long name of a gigabyte": header(tarfile.GNUTYPE_LONGNAME, 1 << 30),
    "long names without end": (header(tarfile.GNUTYPE_LONGNAME, 2) + padded(b"a\0")) * 3000 + member("a"),
    "a broken header after the first": member("a") + b"\xff" * BLOCK,
    "something behind the end": member("a") + END + member("hidden"),
    "zeros without end": member("a") + bytes(20 << 20),
}

BOMBS: dict[str, bytes] = {
    "one file": member("zeros", size=30_000_000),
    "many files": b"".join(member(f"{number}", size=700_000) for number in range(40)),
}
ALL = [
    *(pytest.param(content + END, id=f"{name}, tar") for name, content in HOSTILE.items()),
    *(
        pytest.param(gzip.compress(content + END, 9, mtime=0), id=f"{name}, tar.gz")
        for name, content in (HOSTILE | BOMBS).items()
    ),
]


def state_of(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What a refused archive must leave alone; reading it may move the time of access."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*")) if path.name != "inner"}
    return {
        path: (stat.st_mode, stat.st_ino, stat.st_nlink, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()
    }


@pytest.mark.parametrize("content", ALL)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_text("s")
    hostile = inner / "x.tar.gz"
    hostile.write_bytes(content)
    before = state_of(tmp_path)

    with pytest.raises(ArtifactError) as refused:
        unpack(hostile, inner / "out", limits=LIMITS)

    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()
    assert state_of(tmp_path) == before
    assert not Path("/tmp/gpuflow-absolute").exists()


def test_special_bits_and_owners_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(member("program", mode=0o6777) + member("plain", mode=0o6000) + END)

    unpack(tmp_path / "x", tmp_path / "out")

    assert (tmp_path / "out" / "program").stat().st_mode & 0o7777 & ~0o022 == 0o755 & ~0o022
    assert (tmp_path / "out" / "plain").stat().st_mode & 0o7111 == 0


@pytest.mark.parametrize("spoil", [lambda b: b[:-8] + bytes(8), lambda b: b[:-4], lambda b: b + b"?" * 40])
def test_the_sum_of_the_compressor_is_checked(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    (tmp_path / "x.tar.gz").write_bytes(spoil(gzip.compress(member("a") + END)))

    with pytest.raises(ArtifactError, match="cannot be unpacked"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")


def test_other_compressors_are_refused(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    (tmp_path / "x.tar.xz").write_bytes(made.getvalue())

    with pytest.raises(ArtifactError, match=r"no tar, tar\.gz or tar\.zst"):
        unpack(tmp_path / "x.tar.xz", tmp_path / "out")


@pytest.mark.parametrize(
    ("limits", "content", "cause"),
    [
        (Limits(max_bytes=1000), member("a", size=600) + member("b", size=600), "unpacks to more than 1000 bytes"),
        (Limits(max_members=2), b"".join(member(name) for name in "abc"), "more than 2 files"),
        (Limits(free_ratio_bytes=1000, max_ratio=2), member("zeros", size=100_000), "too much for its size"),
        (Limits(max_depth=3), member("a/b/c/d"), "deeper than 3 folders"),
    ],
    ids=["bytes", "members", "ratio", "depth"],
)
def test_each_limit_holds_by_itself(tmp_path: Path, limits: Limits, content: bytes, cause: str) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(content + END))

    with pytest.raises(ArtifactError, match=cause):
        unpack(tmp_path / "x", tmp_path / "out", limits=limits)

    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_the_disk_has_not_free_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(member("a", size=600) + END)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1000, 500, 500))

    with pytest.raises(ArtifactError, match="'a', which claims 600 bytes, more than the disk has free"):
        unpack(tmp_path / "x", tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["x"]
