"""A worker that stops all it runs also stops what it was just about to run."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from gpuflow.worker.runtime import Runtime


def test_an_attempt_that_begins_after_the_handing_back_is_handed_back_too() -> None:
    names = ("app", "worker_id", "hardware", "labels", "leases", "admission", "machine_gpus", "supported_runtimes")
    parts: Any = dict.fromkeys(names)
    runtime, early, late = Runtime(**parts), Mock(), Mock()
    runtime.begin("early", early)
    early.stop.assert_not_called()

    runtime.stop_all("preempted")
    runtime.begin("late", late)

    early.stop.assert_called_once_with("preempted", at_once=False)
    late.stop.assert_called_once_with("preempted")


def test_replicas_are_let_go_and_other_tasks_are_not() -> None:
    names = ("app", "worker_id", "hardware", "labels", "machine_gpus", "supported_runtimes")
    parts: Any = dict.fromkeys(names)
    admission, leases = Mock(), Mock()
    admission.replicas.return_value = ["tag", "not begun", "gone"]
    leases.held.return_value = {"tag": Mock(task="replica"), "not begun": Mock(task=""), "other": Mock(task="other")}
    runtime, replica, other = Runtime(**parts, admission=admission, leases=leases), Mock(), Mock()
    runtime.begin("replica", replica)
    runtime.begin("other", other)

    runtime.stop_replicas()

    replica.stop.assert_called_once_with("preempted", at_once=False)
    other.stop.assert_not_called()
