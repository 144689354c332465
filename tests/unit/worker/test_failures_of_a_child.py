"""What a child's end means when it says one thing and its process another."""

from __future__ import annotations

import signal

import pytest

from gpuflow.worker.child import ChildEnd
from gpuflow.worker.outcome import failed

KILLED = ChildEnd(exit_code=None, signal=signal.SIGKILL)


@pytest.mark.parametrize(
    ("finish", "end", "kind", "retryable"),
    [
        ({"status": "completed"}, ChildEnd(exit_code=3, signal=None), "Contradiction", False),
        ({"status": "completed"}, KILLED, "ChildKilled", True),
        ({"status": "completed", "error": {"type": "Odd"}}, KILLED, "ChildKilled", True),
        ({"status": "completed"}, ChildEnd(exit_code=None, signal=None), "ChildLost", True),
        ({"status": "failed", "error": {"type": "Own", "retryable": False}}, KILLED, "Own", False),
        ({}, KILLED, "ChildKilled", True),
        ({}, ChildEnd(exit_code=0, signal=None), "NoFinish", False),
    ],
)
def test_the_kind_of_a_failure(finish: dict, end: ChildEnd, kind: str, retryable: bool) -> None:
    error = failed(finish, end)

    assert (error["type"], error["retryable"]) == (kind, retryable)
