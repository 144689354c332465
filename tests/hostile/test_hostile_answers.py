"""Answers of a hostile HTTP server: each is refused with its cause, and little of it is read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.artifacts.http_store import HttpStore, fetch_http
from gpuflow.artifacts.store import TooLarge, fetch
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.support.hostile_peer import HostilePeer, bomb

MOST_BYTES = 4 << 20
#: What reading may add to the memory of a process, in bytes.
MEMORY_BYTES = 50_000_000


@pytest.fixture
def peer() -> Iterator[HostilePeer]:
    with HostilePeer() as made:
        yield made


@pytest.fixture
def settings() -> Settings:
    return Settings(download_max_bytes=MOST_BYTES)


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/bomb", "HTTP 500"),
        ("/endless-error", "HTTP 500"),
        ("/nested", "HTTP 500"),
        ("/loop", "redirects"),
        ("/length", "broke"),
    ],
)
def test_an_answer_is_bounded(peer: HostilePeer, settings: Settings, tmp_path: Path, path: str, cause: str) -> None:
    bomb()  # is made once, and that is ours
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=cause):
            fetch_http(peer.url + path, tmp_path / "f", settings=settings, throttle=Throttle(None), max_attempts=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(set(peer.asked)) == 1
    assert len(peer.asked) <= 6
    assert peak < MEMORY_BYTES


@pytest.mark.parametrize("path", ["/endless", "/large"])
def test_a_download_is_bounded(peer: HostilePeer, settings: Settings, tmp_path: Path, path: str) -> None:
    with pytest.raises(TooLarge, match="GPUFLOW_DOWNLOAD_MAX_BYTES"):
        fetch(peer.url + path, tmp_path / "f", settings=settings)

    assert not (tmp_path / "f").exists()
    assert sum(part.stat().st_size for part in tmp_path.glob(".gpuflow-*")) <= MOST_BYTES


@pytest.mark.parametrize("path", ["/bomb", "/endless-error", "/endless", "/nested", "/loop"])
def test_a_store_that_is_none(peer: HostilePeer, settings: Settings, tmp_path: Path, path: str) -> None:
    (tmp_path / "f").write_bytes(b"1")
    store = HttpStore(peer.url + path, settings=settings, throttle=Throttle(None), max_attempts=1)

    with pytest.raises(ArtifactError):
        store.list("task-1")
    with pytest.raises(ArtifactError):
        store.put(tmp_path / "f", "task-1/f")
    with pytest.raises(ArtifactError):
        store.delete("task-1")


def test_a_token_with_a_line_feed_is_not_shown(peer: HostilePeer, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as refused:
        fetch(f"{peer.url}/large", tmp_path / "f", settings=settings, token="hidden-part\nof it")

    assert "no header may have" in str(refused.value)
    assert "hidden-part" not in str(refused.value)
