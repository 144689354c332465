"""The files of one folder, a few at once: their order, their end when one fails, and the cap over all of them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from gpuflow.artifacts.destination import UploadFailed, upload_attempt
from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.several import MOST_AT_ONCE, several
from gpuflow.artifacts.store import Progress, Throttle

DEADLINE_SECONDS = 30


class Wrong(Exception):
    pass


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuflow-several")]


def until_stopped(told: Progress, stopped: list[int]) -> None:
    """Tell of bytes until that is no longer wanted."""
    try:
        while True:
            told(1)
    except BaseException:
        stopped.append(1)
        raise


def test_so_many_go_on_at_once_and_no_more() -> None:
    together = threading.Barrier(MOST_AT_ONCE)
    lock, now, most = threading.Lock(), 0, 0

    def work(item: int, _: Progress) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(DEADLINE_SECONDS)
        with lock:
            now -= 1
        return item * item

    assert several(work, range(3 * MOST_AT_ONCE)) == [item * item for item in range(3 * MOST_AT_ONCE)]
    assert most == MOST_AT_ONCE
    assert running() == []


def test_results_are_in_the_order_of_the_items_whichever_ends_first() -> None:
    ends = [threading.Event() for _ in range(MOST_AT_ONCE + 1)]
    ends[-1].set()

    def work(item: int, _: Progress) -> str:
        assert ends[item + 1].wait(DEADLINE_SECONDS)  # the last one ends first
        ends[item].set()
        return f"item {item}"

    assert several(work, range(MOST_AT_ONCE)) == [f"item {item}" for item in range(MOST_AT_ONCE)]


@pytest.mark.parametrize("items", [[], ["a"]])
def test_for_one_item_or_none_there_are_no_threads(items: list[str]) -> None:
    assert several(lambda item, _: (item, threading.current_thread()), items) == [
        (item, threading.current_thread()) for item in items
    ]


def test_the_first_failure_stops_the_others_and_nothing_goes_on() -> None:
    begun: list[int] = []
    stopped: list[int] = []
    under_way = threading.Barrier(MOST_AT_ONCE)

    def work(item: int, told: Progress) -> None:
        begun.append(item)
        under_way.wait(DEADLINE_SECONDS)
        if item == 1:
            raise Wrong("of item 1")
        until_stopped(told, stopped)

    with pytest.raises(Wrong, match="of item 1"):
        several(work, range(100))

    assert sorted(begun) == list(range(MOST_AT_ONCE))
    assert len(stopped) == MOST_AT_ONCE - 1
    assert running() == []


def test_progress_is_told_by_one_thread_at_a_time_and_what_it_raises_stops_all() -> None:
    inside = threading.Lock()
    total = 0

    def progress(count: int) -> None:
        nonlocal total
        assert inside.acquire(blocking=False)
        total += count
        inside.release()
        if total == 1000:
            raise Wrong("no longer wanted")

    stopped: list[int] = []
    under_way = threading.Barrier(MOST_AT_ONCE)

    def work(_: int, told: Progress) -> None:
        under_way.wait(DEADLINE_SECONDS)
        until_stopped(told, stopped)

    with pytest.raises(Wrong, match="no longer wanted"):
        several(work, range(MOST_AT_ONCE), progress=progress)

    assert total == 1000
    assert len(stopped) == MOST_AT_ONCE
    assert running() == []


def test_an_interrupt_stops_all() -> None:
    stopped: list[int] = []
    under_way = threading.Barrier(MOST_AT_ONCE, action=lambda: os.kill(os.getpid(), signal.SIGINT))

    def work(_: int, told: Progress) -> None:
        under_way.wait(DEADLINE_SECONDS)
        until_stopped(told, stopped)

    with pytest.raises(KeyboardInterrupt):
        several(work, range(MOST_AT_ONCE))

    assert len(stopped) == MOST_AT_ONCE
    assert running() == []


def shards(folder: Path, count: int, size: int) -> list[str]:
    folder.mkdir()
    names = [f"model-{number}.bin" for number in range(count)]
    for name in [*names, "manifest.json"]:
        (folder / name).write_bytes(os.urandom(size))
    return [*names, "manifest.json"]


def test_the_cap_is_over_the_sum_of_the_files(tmp_path: Path) -> None:
    cap, size = 1_000_000, 300_000
    waits: list[float] = []
    throttle = Throttle(cap, clock=lambda: 0.0, sleep=waits.append)  # a clock that stands: debts add up
    names = shards(tmp_path / "attempt", 5, size)

    upload_attempt(LocalStore(tmp_path / "store", throttle=throttle), tmp_path / "attempt", "task-1", 1, names)

    assert max(waits) == pytest.approx(6 * size / cap)


def test_one_that_fails_leaves_no_manifest_and_no_unfinished_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", throttle=Throttle(None))
    names = shards(tmp_path / "attempt", 6, 10 << 20)
    (tmp_path / "attempt" / "model-2.bin").unlink()

    with pytest.raises(UploadFailed, match=r"model-2\.bin is not there"):
        upload_attempt(store, tmp_path / "attempt", "task-1", 1, names)

    left = {path.name: path for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert "manifest.json" not in left
    assert left.keys() <= set(names)  # whole ones, which nobody looks for without the manifest
    assert all(path.read_bytes() == (tmp_path / "attempt" / name).read_bytes() for name, path in left.items())
    assert running() == []
