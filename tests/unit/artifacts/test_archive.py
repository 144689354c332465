"""Archives: the same files give the same bytes, and nothing leaves the folder it is unpacked into."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from gpuflow.artifacts import archive
from gpuflow.artifacts.archive import pack, unpack
from gpuflow.errors import ArtifactError


@pytest.fixture(params=["with tarfile's filter", "without it, as before Python 3.11.4"])
def any_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param.startswith("without"):
        monkeypatch.setattr(archive, "_FILTER", {})


def make(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, link, mode
    found.size = 3 if kind == tarfile.REGTYPE else 0
    return found


def test_what_was_packed_comes_back(tmp_path: Path, any_python: None) -> None:
    source = tmp_path / "final_lora"
    (source / "deep").mkdir(parents=True)
    (source / "weights.bin").write_bytes(os.urandom(1000))
    (source / "deep" / "config.json").write_text("{}")
    (source / "link").symlink_to("weights.bin")

    pack(source, tmp_path / "a.tar.gz")
    pack(source, tmp_path / "b.tar.gz")
    unpack(tmp_path / "a.tar.gz", tmp_path / "out")

    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    there = tmp_path / "out" / "final_lora"
    assert (there / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    assert (there / "deep" / "config.json").read_text() == "{}"
    assert (there / "link").read_bytes() == (source / "weights.bin").read_bytes()


@pytest.mark.parametrize(
    "members",
    [
        [member("../out-of-it")],
        [member("/tmp/absolute")],
        [member("a/../../out-of-it")],
        [member("link", tarfile.SYMTYPE, link="/etc/passwd")],
        [member("link", tarfile.SYMTYPE, link="../..")],
        [member("link", tarfile.LNKTYPE, link="../secret")],
        [member("door", tarfile.SYMTYPE, link=".."), member("door/out-of-it")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
    ],
    ids=lambda members: f"{members[-1].name}->{members[-1].linkname}",
)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    tmp_path: Path, any_python: None, members: list[tarfile.TarInfo]
) -> None:
    (tmp_path / "secret").write_text("s")
    hostile = make(tmp_path / "x.tar.gz", *members)
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ArtifactError):
        unpack(hostile, tmp_path / "out")

    assert sorted(tmp_path.rglob("*")) == before


def test_special_bits_are_dropped(tmp_path: Path, any_python: None) -> None:
    unpack(make(tmp_path / "x.tar.gz", member("program", mode=0o6777)), tmp_path / "out")

    assert (tmp_path / "out" / "program").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_archive_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)

    with pytest.raises(ArtifactError, match="cannot be unpacked"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")
