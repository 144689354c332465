"""The bandwidth cap, on a clock of its own."""

from __future__ import annotations

import pytest

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
        throttle.take(throttle.block_bytes)
        clock.now += own_share * throttle.block_bytes / cap  # reading and writing the block
        total += throttle.block_bytes

    assert total / (clock.now - 100) == pytest.approx(cap, rel=0.1)


def test_a_rest_is_not_saved_up_for_a_burst() -> None:
    clock = Clock()
    throttle = Throttle(1000, clock=clock, sleep=clock.sleep)
    clock.now += 3600

    throttle.take(1000)

    assert clock.now - 3700 == pytest.approx(1, abs=0.11)


def test_without_a_cap_nothing_waits() -> None:
    def never(seconds: float) -> None:
        raise AssertionError(seconds)

    throttle = Throttle(None, sleep=never)
    throttle.take(1 << 40)

    assert throttle.block_bytes == BLOCK_BYTES


def test_all_transfers_of_a_process_share_one_throttle() -> None:
    assert shared_throttle(1234) is shared_throttle(1234)
    assert shared_throttle(1234) is not shared_throttle(None)


@pytest.mark.parametrize(("cap", "block"), [(1, 512), (1_000_000, 50_000), (10**9, BLOCK_BYTES)])
def test_a_block_is_a_twentieth_of_a_second(cap: int, block: int) -> None:
    assert Throttle(cap).block_bytes == block
