"""Archives: the same files give the same bytes, and what was packed comes back."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import socket
import tarfile
from pathlib import Path

import pytest

from gpuflow.artifacts.archive import SUFFIXES, Compression, Limits, pack, pack_into, unpack
from gpuflow.errors import ArtifactError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "final_lora"
    (made / "deep").mkdir(parents=True)
    (made / "weights.bin").write_bytes(os.urandom(3_000_000))
    (made / "deep" / "config.json").write_text("{}")
    (made / "link").symlink_to("weights.bin")
    return made


@pytest.mark.parametrize("suffix", SUFFIXES.values())
def test_what_was_packed_comes_back_and_twice_gives_the_same_bytes(tmp_path: Path, folder: Path, suffix: str) -> None:
    one, other = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"

    packed = pack(folder, one)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    (folder / "weights.bin").chmod(0o600)
    pack(folder, other)
    unpack(one, tmp_path / "out")

    assert one.read_bytes() == other.read_bytes()
    assert packed.size == one.stat().st_size
    assert packed.sha256 == hashlib.sha256(one.read_bytes()).hexdigest()
    there = tmp_path / "out" / "final_lora"
    assert (there / "weights.bin").read_bytes() == (folder / "weights.bin").read_bytes()
    assert (there / "deep" / "config.json").read_text() == "{}"
    assert (there / "link").readlink() == Path("weights.bin")
    assert (there / "link").read_bytes() == (folder / "weights.bin").read_bytes()


def test_two_links_to_one_file_are_packed_as_copies_are(tmp_path: Path, folder: Path) -> None:
    (folder / "same.bin").hardlink_to(folder / "weights.bin")
    pack(folder, tmp_path / "a.tar.gz")
    (folder / "same.bin").unlink()
    (folder / "same.bin").write_bytes((folder / "weights.bin").read_bytes())

    pack(folder, tmp_path / "b.tar.gz")

    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


class Pipe(io.RawIOBase):
    """Takes bytes and can do nothing else: no seek, no tell."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self.largest = 0

    def writable(self) -> bool:
        return True

    def write(self, block: object, /) -> int:
        self.largest = max(self.largest, len(block))  # type: ignore[arg-type]
        self.taken += block  # type: ignore[operator]
        return len(block)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", SUFFIXES)
def test_an_archive_is_built_while_it_streams(tmp_path: Path, folder: Path, compression: Compression) -> None:
    pipe = Pipe()

    packed = pack_into(folder, pipe, compression=compression)

    (tmp_path / "x").write_bytes(pipe.taken)
    unpack(tmp_path / "x", tmp_path / "out")
    assert packed.sha256 == hashlib.sha256(pipe.taken).hexdigest()
    assert pipe.largest < 1_000_000
    assert (tmp_path / "out" / "final_lora" / "link").exists()


@pytest.mark.parametrize("kind", ["absolute link", "link out", "circle", "pipe", "socket"])
def test_what_could_not_be_unpacked_is_not_packed(tmp_path: Path, folder: Path, kind: str) -> None:
    place = folder / "bad"
    (tmp_path / "outside").write_text("x")
    if kind == "absolute link":
        place.symlink_to(folder / "weights.bin")
    elif kind == "link out":
        place.symlink_to("../outside")
    elif kind == "circle":
        place.symlink_to("bad")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(place))

    with pytest.raises(ArtifactError, match="bad"):
        pack(folder, tmp_path / "a.tar.gz")

    assert [path.name for path in tmp_path.iterdir() if "tar" in path.name] == []


@pytest.mark.parametrize("suffix", SUFFIXES.values())
def test_every_cut_of_an_archive_is_found(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_bytes(os.urandom(2000))
    whole = tmp_path / f"x{suffix}"
    pack(folder, whole)
    content = whole.read_bytes()

    for end in range(0, len(content), 7):
        whole.write_bytes(content[:end])
        with pytest.raises(ArtifactError):
            unpack(whole, tmp_path / "out")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", whole.name]


@pytest.mark.parametrize("plain", [True, False], ids=["tar", "tar.gz"])
def test_a_changed_byte_gives_an_error_or_an_archive_and_never_another_exception(tmp_path: Path, plain: bool) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / ("long" * 30)).write_bytes(b"x" * 100)
    (folder / "link").symlink_to("long" * 30)
    pack(folder, tmp_path / "x.tar.gz")
    content = (tmp_path / "x.tar.gz").read_bytes()
    if plain:
        content = gzip.decompress(content)
    chance = random.Random(4)
    path = tmp_path / "changed"
    refused = 0

    for _ in range(400):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(min(len(changed), 4096))] = chance.randrange(256)
        path.write_bytes(changed)
        out = tmp_path / "out"
        try:
            unpack(path, out)
        except ArtifactError:
            refused += 1
        else:
            for at in sorted(out.rglob("*"), reverse=True):
                at.rmdir() if at.is_dir() and not at.is_symlink() else at.unlink()
            out.rmdir()

    assert refused > 100
    assert sorted(at.name for at in tmp_path.iterdir()) == ["changed", "f", "x.tar.gz"]


def test_tars_of_the_common_tools_unpack(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("./")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.add(tmp_path / "f", arcname="./deep/" + "n" * 120)
        tar.add(tmp_path / "f", arcname="./deep/again")

    unpack(tmp_path / "x.tar", tmp_path / "out", limits=Limits(max_members=3))

    assert (tmp_path / "out" / "deep" / "again").read_text() == "x"
    assert (tmp_path / "out" / "deep" / ("n" * 120)).read_text() == "x"


@pytest.mark.parametrize(
    "content", [b"", b"no archive", b"\x1f\x8b\x08\x00broken", b"\x28\xb5\x2f\xfdbroken", bytes(10240)]
)
def test_what_is_no_archive_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)

    with pytest.raises(ArtifactError, match=r"x\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")


def test_without_its_library_zstd_is_refused_with_the_mend(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuflow.artifacts.archive._ZSTD_MODULE", "a_module_that_is_not_here")

    with pytest.raises(ArtifactError, match=r"pip install 'gpuflow\[zstd\]'"):
        pack(folder, tmp_path / "a.tar.zst")
