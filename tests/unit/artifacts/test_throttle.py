"""The bandwidth cap, on a clock of its own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.throttle import BLOCK_BYTES, Throttle, shared_throttle


class Clock:
    """Time that passes when somebody sleeps, or when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("cap", [5_000, 1_000_000, 125_000_000])
@pytest.mark.parametrize("own_share", [0.0, 0.5, 0.99])
def test_the_rate_is_the_cap_whatever_the_transfer_itself_takes(cap: int, own_share: float) -> None:
    clock = Clock()
    throttle = Throttle(cap, clock=clock, sleep=clock.sleep)
    total = 0

    while total < 10 * cap:
        throttle.wait_for_bytes(throttle.block_bytes)
        clock.now += own_share * throttle.block_bytes / cap  # reading and writing the block
        total += throttle.block_bytes

    assert total / (clock.now - 100) == pytest.approx(cap, rel=0.1)


def test_a_rest_is_not_saved_up_for_a_burst() -> None:
    clock = Clock()
    throttle = Throttle(1000, clock=clock, sleep=clock.sleep)
    clock.now += 3600

    throttle.wait_for_bytes(1000)

    assert clock.now - 3700 == pytest.approx(1, abs=0.11)


def test_without_a_cap_nothing_waits() -> None:
    def never(seconds: float) -> None:
        raise AssertionError(seconds)

    throttle = Throttle(None, sleep=never)
    throttle.wait_for_bytes(1 << 40)

    assert throttle.block_bytes == BLOCK_BYTES


def test_all_transfers_of_a_process_share_one_throttle() -> None:
    assert shared_throttle(1234) is shared_throttle(1234)
    assert shared_throttle(1234) is not shared_throttle(None)


@pytest.mark.parametrize(("cap", "block"), [(1, 512), (1_000_000, 50_000), (10**9, BLOCK_BYTES)])
def test_a_block_is_a_twentieth_of_a_second(cap: int, block: int) -> None:
    assert Throttle(cap).block_bytes == block


class FairClock:
    """Time for several threads. A sleep lasts from when it was asked for, whatever the others do meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()
        self._asked = threading.local()

    def __call__(self) -> float:
        with self._lock:
            self._asked.at = self.now
            return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now = max(self.now, self._asked.at + seconds)


@pytest.mark.parametrize("transfers", [2, 5])
def test_transfers_at_the_same_time_share_the_cap(tmp_path: Path, transfers: int) -> None:
    cap, size = 1_000_000, 3_000_000
    clock = FairClock()
    throttle = Throttle(cap, clock=clock, sleep=clock.sleep)
    store = LocalStore(tmp_path / "store", throttle=throttle)
    for number in range(transfers):
        (tmp_path / str(number)).write_bytes(os.urandom(size))

    with ThreadPoolExecutor(transfers) as pool:
        list(pool.map(lambda number: store.put(tmp_path / str(number), f"t/{number}"), range(transfers)))
    put_seconds = clock.now
    with ThreadPoolExecutor(transfers) as pool:
        list(pool.map(lambda number: store.get(f"t/{number}", tmp_path / f"back-{number}"), range(transfers)))

    assert transfers * size / put_seconds == pytest.approx(cap, rel=0.1)
    assert transfers * size / (clock.now - put_seconds) == pytest.approx(cap, rel=0.1)
