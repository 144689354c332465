"""What is repeated beside a block: until it says no, or the block ends."""

from __future__ import annotations

import threading

import pytest

from gpuflow.repeating import repeating
from tests.support.waiting import eventually


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "beside"]


def test_it_goes_on_until_the_block_ends() -> None:
    twice = threading.Event()
    calls: list[int] = []

    def action() -> bool:
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        return True

    with repeating(action, 0.001, "beside"):
        assert twice.wait(30)
    assert threads() == []


def test_it_ends_when_the_action_says_no() -> None:
    thrice = threading.Event()
    calls: list[int] = []

    def action() -> bool:
        calls.append(1)
        if len(calls) == 3:
            thrice.set()
        return len(calls) < 3

    with repeating(action, 0.001, "beside"):
        assert thrice.wait(30)
        eventually(lambda: not threads(), what="the end of the thread")
    assert len(calls) == 3


def test_the_thread_is_over_when_the_block_raises() -> None:
    with pytest.raises(ValueError, match="by the block"), repeating(lambda: True, 60, "beside"):
        raise ValueError("by the block")
    assert threads() == []
