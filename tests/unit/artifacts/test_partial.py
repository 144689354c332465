"""A file that comes in block by block: resumed, hashed, and visible only when it is whole and right."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.artifacts.partial import PartFile, disk_errors, has_content, left_over
from gpuflow.artifacts.receiving import Meter, receive
from gpuflow.artifacts.store import open_store
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Cut(Exception):
    pass


class Source:
    """Sends CONTENT in blocks of 1000 bytes; `ends` tells where the line is cut, one for each call."""

    def __init__(self, *ends: int, content: bytes = CONTENT) -> None:
        self.ends, self.content = list(ends), content
        self.asked: list[int] = []

    def __call__(self, offset: int) -> Iterator[bytes]:
        self.asked.append(offset)
        end = self.ends.pop(0) if self.ends else len(self.content)
        for at in range(offset, end, 1000):
            yield self.content[at : min(at + 1000, end)]
        if end < len(self.content):
            raise Cut


def bring(target: Path, source: Source, *, sha256: str | None = DIGEST, size: int | None = len(CONTENT)) -> str:
    return receive(target, source_id="v1", size=size, sha256=sha256, blocks=source, meter=Meter(None))[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_cut_transfer_goes_on_where_it_ended(tmp_path: Path) -> None:
    source = Source(3000, 7500)
    for _ in range(2):
        with pytest.raises(Cut):
            bring(tmp_path / "a", source)
        assert not (tmp_path / "a").exists()

    assert bring(tmp_path / "a", source) == DIGEST
    assert source.asked == [0, 3000, 7500]
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert names(tmp_path) == ["a"]


def test_a_spoilt_part_is_thrown_away_and_all_is_fetched_again(tmp_path: Path) -> None:
    source = Source(3000)
    with pytest.raises(Cut):
        bring(tmp_path / "a", source)
    (part,) = tmp_path.iterdir()
    part.write_bytes(b"?" * 3000)

    assert bring(tmp_path / "a", source) == DIGEST
    assert source.asked == [0, 3000, 0]


def test_a_part_that_is_too_long_is_thrown_away(tmp_path: Path) -> None:
    source = Source(3000)
    with pytest.raises(Cut):
        bring(tmp_path / "a", source)
    (part,) = tmp_path.iterdir()
    part.write_bytes(b"?" * 20_000)

    assert bring(tmp_path / "a", source) == DIGEST
    assert source.asked == [0, 0]


@pytest.mark.parametrize(
    ("sha256", "size", "cause"),
    [("0" * 64, len(CONTENT), "SHA-256"), (DIGEST, 5, "instead of 5"), (None, 10**6, "instead of 1000000")],
)
def test_what_is_wrong_is_refused_and_not_kept(tmp_path: Path, sha256: str | None, size: int, cause: str) -> None:
    source = Source()

    with pytest.raises(ArtifactError, match=cause):
        bring(tmp_path / "a", source, sha256=sha256, size=size)

    assert source.asked == [0]
    assert names(tmp_path) == []


def test_a_second_transfer_at_the_same_time_has_a_part_of_its_own(tmp_path: Path) -> None:
    with PartFile(tmp_path / "a", "v1") as first, PartFile(tmp_path / "a", "v1") as second:
        first.append(b"first")
        second.append(b"second")
        assert first.path != second.path
        assert first.path.exists()
        second.commit()
        first.commit()

    assert (tmp_path / "a").read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


def test_what_other_transfers_have_left_is_swept(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        with PartFile(tmp_path / "neighbour", version) as part:
            part.append(b"x")
    with PartFile(tmp_path / "a", "v1") as part:
        part.append(b"x")

    with PartFile(tmp_path / "a", "v2") as part:
        assert part.size == 0
        assert len(names(tmp_path)) == 2  # the neighbour's latest, and this one
        part.append(b"y")

    with PartFile(tmp_path / "a", "v2") as part:
        assert (part.size, part.sha256) == (1, hashlib.sha256(b"y").hexdigest())


def test_a_link_in_the_place_of_a_part_is_not_written_through(tmp_path: Path) -> None:
    with PartFile(tmp_path / "a", "v1") as part:
        part.append(b"x")
    victim = tmp_path / "victim"
    victim.write_text("v")
    part.path.unlink()
    part.path.symlink_to(victim)

    with pytest.raises(OSError, match="symbolic"):
        PartFile(tmp_path / "a", "v1")

    assert victim.read_text() == "v"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_part_on_a_full_disk_is_removed(tmp_path: Path, code: int) -> None:
    def blocks(offset: int) -> Iterator[bytes]:
        yield b"x"
        raise OSError(code, "no room")

    with (
        pytest.raises(ArtifactError, match="a cannot be fetched: no room; free some space"),
        disk_errors("a cannot be fetched"),
    ):
        receive(tmp_path / "a", source_id="v1", size=9, sha256=None, blocks=blocks, meter=Meter(None))

    assert names(tmp_path) == []


def test_a_meter_tells_of_each_byte_once() -> None:
    told: list[int] = []
    meter = Meter(told.append)

    for offset in (0, 5, 3, 5, 9):
        meter.reached(offset)

    assert told == [5, 4]
    assert meter.offset == 9


def test_content_is_compared_by_digest(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert not has_content(path, DIGEST)
    path.write_bytes(CONTENT)

    assert has_content(path, DIGEST.upper(), len(CONTENT))
    assert not has_content(path, DIGEST, 1)
    assert not has_content(path, "0" * 64)
    assert not has_content(path, None)


def test_what_is_left_over_is_the_largest_part_of_the_target(tmp_path: Path) -> None:
    target = tmp_path / "a"
    assert left_over(target) == left_over(tmp_path / "no-folder" / "a") == 0
    with PartFile(target, "v1") as part:
        part.append(b"123")
    with PartFile(tmp_path / "neighbour", "v1") as part:
        part.append(b"12345")

    assert left_over(target) == 3


def test_a_copy_by_the_kernel_has_the_digest_of_what_was_stored(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT * 3_000)
    counts: list[int] = []

    with PartFile(tmp_path / "a", "v1") as part, source.open("rb", buffering=0) as stream:
        part.append(CONTENT)
        stream.seek(len(CONTENT))
        part.copy(stream, counts.append)
        part.append(b"and more")
        part.commit()

    assert (tmp_path / "a").read_bytes() == CONTENT * 3_000 + b"and more"
    assert part.sha256 == hashlib.sha256(CONTENT * 3_000 + b"and more").hexdigest()
    assert sum(counts) == len(CONTENT) * 2_999


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_where_the_kernel_does_not_copy_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuses(*_: object) -> int:
        raise OSError(code, "no")

    monkeypatch.setattr(os, "copy_file_range", refuses)
    (tmp_path / "source").write_bytes(CONTENT)

    stored = open_store((tmp_path / "store").as_uri(), settings=Settings()).put(tmp_path / "source", "a")

    assert stored.sha256 == DIGEST
    assert (tmp_path / "store" / "a").read_bytes() == CONTENT


def test_a_source_that_changes_while_it_is_stored_is_found(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20 << 20))
    store = open_store((tmp_path / "store").as_uri(), settings=Settings())

    def spoil(_: int) -> None:
        with source.open("r+b") as file:
            file.seek(19 << 20)
            file.write(b"changed")
        os.utime(source, ns=(1, 1))  # a clock tick may be longer than this test

    with pytest.raises(ArtifactError, match="changed while it was stored"):
        store.put(source, "a", progress=spoil)

    assert names(tmp_path / "store") == []


def test_trouble_of_the_disk_keeps_its_number_and_its_first_words() -> None:
    with pytest.raises(ArtifactError) as caught, disk_errors("outer"), disk_errors("inner cannot be stored"):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).startswith("inner cannot be stored: No space left on device; free some space")
