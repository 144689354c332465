"""Every attempt has exactly the GPUs that its task asks for, and nobody else has them, however fast they follow."""

from __future__ import annotations

from pathlib import Path

from tests.support.attempt_spans import spans_in
from tests.support.boxes import Box
from tests.support.fleet import TestFleet
from tests.support.spans import double_bookings
from tests.support.waiting import eventually, promised

TASKS = 12
ATTEMPTS = 10


def test_tasks_that_fail_at_once_and_come_back_at_once_share_no_gpu(fleet: TestFleet, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with Box(fleet, "two", "2xA100-40GB") as box:
        box.start("w1", "--include", "attempt_spans", ATTEMPT_SPANS=str(path))
        retry = {"max_attempts": ATTEMPTS, "backoff_seconds": 0}
        tasks = [
            box.submit("A100:1", echo={"fail": {"message": "again", "retryable": True}}, retry=retry)
            for _ in range(TASKS)
        ]

        eventually(lambda: all(task.state == "DEAD" for task in tasks), within=120, what="the end of all tasks")

    spans = spans_in(path)
    assert len(spans) == TASKS * ATTEMPTS
    promised([one.name for one in spans if len(one.gpus) != 1] == [], f"attempts without their GPU: {spans}")
    promised(double_bookings(spans) == [], f"GPUs of two attempts at once: {double_bookings(spans)}")
