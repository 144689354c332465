"""A task is held to the memory and CPUs that it asks for: on groups of files, by address space, by the kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gpuflow.client import submit
from gpuflow.explaining import explain
from gpuflow.worker.cgroups import NoCgroups, find_cgroups
from tests.hostile.workers.test_own_process import command
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

ASKS = {"resources": {"hardware": {"memory": "512MiB", "cpu": 1}}, "retry": {"max_attempts": 1}}
EATS = "b'x' * 1_500_000_000"


def ended(fleet: TestFleet, code: str) -> dict[str, Any]:
    """Run a program that fails, and return the error of its task."""
    task = submit(command(sys.executable, "-c", code, **ASKS), app=fleet.app)
    eventually(lambda: fleet.state(task.id) in ("FAILED", "DEAD"), within=60, what="the end of the task")
    return task.record().error or {}


def test_a_task_joins_its_group_and_an_end_by_the_group_is_out_of_memory(fleet: TestFleet, tmp_path: Path) -> None:
    """The group is a folder of files: the task writes into it what the kernel would."""
    parent = tmp_path / "group"
    parent.mkdir()
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (parent / name).write_text("cpu memory")
    fleet.start_worker("w1", env={"GPUFLOW_CGROUP": str(parent), "GPUFLOW_TASK_LIMITS": "cgroup"})
    find = f"import os; g = {str(parent)!r}; g = [os.path.join(g, n) for n in os.listdir(g) if 'task' in n][0]"
    shows = "print(*[open(os.path.join(g, n)).read() for n in ('memory.max', 'cpu.max', 'cgroup.procs')])"

    task = submit(command(sys.executable, "-c", f"{find}; {shows}", **ASKS), app=fleet.app)
    result = task.get(timeout=patient(60))
    assert result["limits"] == {
        "declared": {"memoryMib": 512, "cpus": 1},
        "enforced": {"memoryMib": 512, "cpus": 1},
        "by": "cgroup",
    }
    assert result["output"].split() == [str(512 << 20), "100000", "100000", "0"]
    assert not list(parent.glob("gpuflow-task-*"))

    events = (
        f"{find}; open(os.path.join(g, 'memory.events'), 'w').write('oom 1\\noom_kill 1\\n'); os.kill(os.getpid(), 9)"
    )
    error = ended(fleet, events)
    assert (error["type"], error["retryable"]) == ("OutOfMemory", False)
    assert "more than the 512 MiB of memory that it asks for" in error["message"]
    (told,) = explain({"taskType": "echo", "echo": {}, **ASKS}, app=fleet.app)
    assert "  limits:   enforced by cgroup on w1" in told.to_lines()


def test_without_a_group_the_address_space_holds_each_process(fleet: TestFleet, tmp_path: Path) -> None:
    env = {"GPUFLOW_CGROUP": str(tmp_path), "GPUFLOW_TASK_LIMITS": "address-space"}
    worker = fleet.start_worker("w1", env=env)
    assert "event=limits_by_address_space" in worker.log()
    assert "held to the 512 MiB that it asks for (GPUFLOW_TASK_LIMITS)" in ended(fleet, EATS)["message"]
    result = submit({**fleet.echo(output=1), **ASKS}, app=fleet.app).get(timeout=patient(30))
    assert (result["limits"]["by"], result["limits"]["enforced"]) == ("address-space", {"memoryMib": 512})


def test_the_kernel_holds_a_task_or_the_worker_says_that_nothing_does(fleet: TestFleet) -> None:
    """On a machine that lets this user make groups the kernel ends the task; on any other nobody claims that."""
    try:
        find_cgroups(Path(os.environ["GPUFLOW_TEST_CGROUP"]) if "GPUFLOW_TEST_CGROUP" in os.environ else None)
        can = True
    except (NoCgroups, OSError):
        can = False
    env = {"GPUFLOW_CGROUP": os.environ["GPUFLOW_TEST_CGROUP"]} if "GPUFLOW_TEST_CGROUP" in os.environ else {}
    worker = fleet.start_worker("w1", env=env)
    if can:
        error = ended(fleet, EATS)
        assert (error["type"], error["retryable"]) == ("OutOfMemory", False), error
        forks = f"import os\nif os.fork() == 0:\n    {EATS}\n    os._exit(0)\nos.wait()\nimport time\ntime.sleep(600)"
        assert ended(fleet, forks)["type"] == "OutOfMemory"  # the whole group goes, not the helper alone
    result = submit({**fleet.echo(output=1), **ASKS}, app=fleet.app).get(timeout=patient(30))
    assert result["limits"]["by"] == ("cgroup" if can else "none")
    assert ("limits_not_enforced" in worker.log()) is not can
    if not can:
        assert "no cgroup: " in result["limits"]["why"]
        (told,) = explain({"taskType": "echo", "echo": {}, **ASKS}, app=fleet.app)
        assert any("memory and CPUs are declared, not enforced, on w1 (no cgroup: " in line for line in told.to_lines())
