"""Stale parts go: those that are a day old and that nobody has locked, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuflow.artifacts.partial import PartFile, left_over
from gpuflow.filelocks import holding
from gpuflow.upkeep.parts_cleaning import STALE_SECONDS, clean_cache, clean_store

NOW = 2_000_000_000.0
HOUR = 3600.0


def age(path: Path, seconds: float) -> Path:
    os.utime(path, (NOW - seconds, NOW - seconds), follow_symlinks=False)
    return path


def broken_off(target: Path, *, age_seconds: float = STALE_SECONDS + HOUR) -> Path:
    """Leave the part of a transfer to `target` that broke off so long ago."""
    with PartFile(target, "source") as part:
        part.append(b"half")
    return age(part.path, age_seconds)


def test_only_stale_parts_go_wherever_they_lie(tmp_path: Path) -> None:
    stale = [broken_off(tmp_path / "uploads" / "a" / "x.bin"), broken_off(tmp_path / "t" / "attempt-1" / "y")]
    young = broken_off(tmp_path / "t" / "z", age_seconds=STALE_SECONDS - HOUR)
    others = [
        tmp_path / "t" / ".gpuflow-mine.part",
        tmp_path / "t" / "weights.part",
        tmp_path / ".gpuflow-gateway" / "parts" / "t" / young.name,
        tmp_path / "t" / "y",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        age(path, 9 * STALE_SECONDS)

    assert sorted(clean_store(tmp_path, now=NOW)) == sorted(stale)

    assert not any(path.exists() for path in stale)
    assert young.exists() and all(path.exists() for path in others)


def test_a_part_in_use_stays_and_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "x.bin"
    broken_off(target)
    with PartFile(target, "source") as part:
        age(part.path, 9 * STALE_SECONDS)
        assert clean_store(tmp_path, now=NOW) == []
        part.append(b" and half")
        part.commit()

    assert target.read_bytes() == b"half and half"
    assert left_over(target) == 0


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = broken_off(tmp_path / "elsewhere" / "x")
    root = tmp_path / "store"
    root.mkdir()
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    age(root / "folder", 9 * STALE_SECONDS)
    link = root / elsewhere.name
    link.symlink_to(elsewhere)
    age(link, 9 * STALE_SECONDS)

    assert clean_store(root, now=NOW) == []
    assert elsewhere.exists() and link.is_symlink()


def test_those_who_share_a_folder_take_turns(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    broken_off(first)
    assert len(clean_store(tmp_path, every_seconds=HOUR, now=NOW)) == 1
    broken_off(second)

    assert clean_store(tmp_path, every_seconds=HOUR, now=NOW + HOUR / 2) == []
    assert len(clean_store(tmp_path, every_seconds=HOUR, now=NOW + 2 * HOUR)) == 1


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert clean_store(tmp_path / "away", now=NOW) == []
    assert clean_cache(tmp_path / "away", now=NOW) == []
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("folder", ["data/key", "references"])
def test_parts_in_the_cache_go(tmp_path: Path, folder: str) -> None:
    stale = broken_off(tmp_path / folder / "x")
    young = broken_off(tmp_path / folder / "y", age_seconds=HOUR)

    assert clean_cache(tmp_path, now=NOW) == [stale]
    assert young.exists()


def download(cache: Path, key: str, age_seconds: float) -> Path:
    place = cache / "fetched" / key
    place.mkdir(parents=True)
    (place / ".lock").touch()
    age(place / ".lock", 9 * STALE_SECONDS)
    broken_off(place / "m.tar.gz", age_seconds=age_seconds)
    whole = place / "broken.tar.gz"  # no archive: it could not be unpacked
    whole.write_bytes(b"no archive")
    age(whole, age_seconds)
    return place


def test_stale_downloads_go_and_their_lock_stays(tmp_path: Path) -> None:
    stale, young = download(tmp_path, "a", 2 * STALE_SECONDS), download(tmp_path, "b", HOUR)

    assert len(clean_cache(tmp_path, now=NOW)) == 2

    assert [path.name for path in stale.iterdir()] == [".lock"]
    assert len(list(young.iterdir())) == 3


def test_a_download_under_way_stays(tmp_path: Path) -> None:
    place = download(tmp_path, "a", 2 * STALE_SECONDS)

    with holding(place / ".lock"):
        assert clean_cache(tmp_path, now=NOW) == []

    assert len(list(place.iterdir())) == 3
