"""At submit, a worker that the autoscaler has disabled counts: it is enabled again for the work."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.views import WorkerView
from gpuflow.submission_checks import problem_of

ASK = [Requirement(gpu_count=0)]


def worker(**fields: Any) -> WorkerView:
    return WorkerView(id="w1", capability=Capability(), **fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"enabled": False, "idled": True}, ""),
        ({"enabled": False, "disabled_by": "by hand"}, "is disabled"),
        ({"enabled": False, "idled": True, "executors": ("inference",)}, "has no executor echo"),
        ({"enabled": False, "idled": True, "state": "SILENT", "silent_seconds": 9.0}, "is silent"),
    ],
)
def test_what_the_autoscaler_has_disabled_can_run_it(fields: dict[str, Any], problem: str) -> None:
    told = problem_of("t", "echo", ASK, [worker(**fields)])
    assert problem in (told or "")
    assert bool(told) is bool(problem)
