"""Why a worker cannot take a task, and whether a worker's -Q covers a queue."""

from __future__ import annotations

import pytest

from gpuflow.cli.explain import reasons_against
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement

A100 = Capability(
    gpus=(GpuCapability(uuid="g", index=0, names=("a100",), vram_gb=80, total_mib=81_000),), memory_mib=1024
)
ASK = Requirement(gpu_count=1, gpu_names=("a100",))


def worker(
    *queues: str, state: WorkerState = WorkerState.IDLE, enabled: bool = True, capability: Capability = A100
) -> WorkerEntry:
    return WorkerEntry(id="w", state=state, queues=queues, enabled=enabled, capability=capability.to_dict())


@pytest.mark.parametrize(
    "queues", [("gpuflow.control", "tasks"), ("gpuflow.control", "gpu-a100"), ("gpu",), ("gpu-a100", "tasks")]
)
def test_a_worker_that_serves_the_queue_has_nothing_against_it(queues: tuple[str, ...]) -> None:
    assert reasons_against(worker(*queues), "gpu-a100", ASK) == []


def test_the_failing_requirement_is_named() -> None:
    [reason] = reasons_against(worker("tasks"), "gpu-h100", Requirement(gpu_count=1, gpu_names=("h100",)))
    assert "h100" in reason
    assert "a100" in reason


def test_q_disabled_and_drain_are_reasons() -> None:
    assert reasons_against(worker("gpuflow.control", "gpu-h100"), "gpu-a100", ASK) == ["its -Q does not cover gpu-a100"]
    assert reasons_against(worker("tasks", enabled=False), "gpu-a100", ASK) == ["it is disabled"]
    assert reasons_against(worker("tasks", state=WorkerState.DRAINING), "gpu-a100", ASK) == ["it drains"]
