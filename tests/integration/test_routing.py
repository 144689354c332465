"""Queues, families and GPUs by real workers on simulated machines (the real pynvml on a simulated NVML library)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from gpuflow.client import submit
from gpuflow.fleet.registry import Fleet
from tests.fixtures.simulated_nvml import gpu_uuid, simulated_machine
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import BrokenPromise, eventually, patient


def ask(fleet: TestFleet, accelerators: str | list[str], **echo: Any) -> dict[str, Any]:
    return {**fleet.echo(report_env=["CUDA_VISIBLE_DEVICES"], **echo), "resources": {"accelerators": accelerators}}


def test_a_task_runs_where_its_gpu_is_and_sees_only_that_gpu(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "4xA100-80GB")
    fleet.start_worker("w1", "-Q", "gpu-a100", "--max-jobs", "1", env=machine)

    h100 = submit(ask(fleet, "H100:1"), app=fleet.app)
    a100 = submit(ask(fleet, "A100:1"), app=fleet.app)
    two = submit(ask(fleet, "A100-80GB:2"), app=fleet.app)

    result = a100.get(timeout=patient(30))
    assert a100.record().queue == "gpu-a100"
    assert result["environment"]["CUDA_VISIBLE_DEVICES"] == result["gpus"][0]
    assert result["gpus"][0] in {gpu_uuid(index) for index in range(4)}
    assert two.record().queue == "gpu-a100-80g-x2"
    assert len(two.get(timeout=patient(30))["gpus"]) == 2
    assert (h100.record().queue, h100.state) == ("gpu-h100", "QUEUED")


def lifetime(fleet: TestFleet, task_id: str) -> tuple[float, float]:
    """Return from when to when a task had its GPUs: from its START to the end of its child."""
    events = fleet.app.event_log.read(task_id)
    (start,) = (event.at for event in events if event.name == "state" and event.data["state"] == "STARTING")
    (end,) = (event.at for event in events if event.name == "finish")
    return start, end


def test_two_tasks_at_once_never_share_a_gpu(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "2xA100-80GB")
    fleet.start_worker("w1", env=machine)

    tasks = [submit(ask(fleet, "A100:1", sleep_seconds=1), app=fleet.app) for _ in range(6)]
    records = [task.wait(timeout=patient(60)) for task in tasks]

    spans: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        assert record.state == "SUCCEEDED"
        (uuid,) = record.result["gpus"]
        spans.setdefault(uuid, []).append(lifetime(fleet, record.id))
    assert set(spans) == {gpu_uuid(0), gpu_uuid(1)}
    for uuid, used in spans.items():
        if twice := [pair for pair in pairwise(sorted(used)) if pair[0][1] > pair[1][0]]:
            raise BrokenPromise(f"{uuid} had two tasks at once: {twice}")


def test_a_queue_registered_later_is_picked_up_while_the_worker_runs(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "1xL4")
    fleet.start_worker("w1", env=machine)

    task = submit(ask(fleet, "24GB:1"), app=fleet.app)

    assert task.get(timeout=patient(20))["gpus"] == [gpu_uuid(0)]
    assert task.record().queue == "gpu-24g"


def test_a_family_serves_its_refinements_and_nothing_else(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "1xA100-40GB")
    fleet.start_worker("w1", "-Q", "gpu-a100", env=machine)

    light = submit(fleet.echo(output=1), app=fleet.app)
    any_gpu = submit(ask(fleet, "24GB:1"), app=fleet.app)
    too_big = submit(ask(fleet, "A100-80GB:1"), app=fleet.app)
    fits = submit(ask(fleet, "A100-40GB:1"), app=fleet.app)

    fits.get(timeout=patient(30))
    assert [task.state for task in (light, any_gpu, too_big)] == ["QUEUED"] * 3


def test_without_resources_a_task_goes_to_any_gpu_if_the_fleet_has_one(fleet: TestFleet, tmp_path: Path) -> None:
    spec = {"taskType": "command", "command": {"command": "true"}}
    before = submit(spec, app=fleet.app)
    machine = simulated_machine(tmp_path, "1xL4")
    fleet.start_worker("w1", "--max-jobs", "0", env=machine)
    with fleet.hasty_client() as app:  # one that has not looked at the fleet in the last second
        queue = submit(spec, app=app).record().queue

    assert (before.record().queue, queue) == ("cpu", "gpu")


def test_visible_devices_and_gpus_option_restrict_the_worker(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "4xA100-80GB")
    fleet.start_worker("w1", "--gpus", "3", env={**machine, "CUDA_VISIBLE_DEVICES": "2,3"})

    entry = Fleet(fleet.app.redis, fleet.app.keys).find("w1")

    assert entry is not None
    assert [gpu["uuid"] for gpu in entry.capability["gpus"]] == [gpu_uuid(3)]
    hidden = WorkerProcess(
        fleet.broker.url, tmp_path, "w2", "--gpus", "1", env={**machine, "CUDA_VISIBLE_DEVICES": "2"}
    )
    assert hidden.process.wait(timeout=patient(30)) == 2
    assert "CUDA_VISIBLE_DEVICES hides" in hidden.log()
    assert "Traceback" not in hidden.log()


def test_a_teams_own_tasks_run_beside_ours(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "1xA100-80GB")
    worker = fleet.start_worker("w1", "--include", "plain_tasks", env=machine)

    add = fleet.app.send_task("plain_tasks.add", args=(1, 2))
    slow = fleet.app.send_task("plain_tasks.too_slow")
    on_gpu = fleet.app.send_task("plain_tasks.on_a100", resources="A100:1")
    impossible = fleet.app.send_task("plain_tasks.on_a100", resources="H100:1")

    assert add.get(timeout=patient(20)) == 3
    assert slow.get(timeout=patient(20)) == "stopped softly"
    assert on_gpu.get(timeout=patient(20)) == "ran"
    assert impossible.state == "PENDING"
    assert fleet.broker.client.llen("gpu-h100") == 1
    stats = fleet.app.control.inspect(timeout=patient(60), limit=1).stats()
    (shown,) = [value for name, value in stats.items() if name.startswith("w1@")]
    assert shown["gpuflow"]["gpus"][0]["name"] == "NVIDIA A100-SXM4-80GB"
    assert worker.process.poll() is None


def test_priority_is_served_first_and_order_holds_within_it(fleet: TestFleet) -> None:
    order = [submit({**fleet.echo(output=n), "priority": p}, app=fleet.app) for n, p in enumerate((1, 5, 9, 5, 0))]
    unset = submit(fleet.echo(output="unset"), app=fleet.app)
    fleet.start_worker("w1", "--max-jobs", "1")

    started = {task.id: task.wait(timeout=patient(60)).started_at for task in (*order, unset)}

    by_start = sorted(started, key=lambda task_id: started[task_id])
    expected = [order[2], order[1], order[3], unset, order[0], order[4]]
    assert by_start == [task.id for task in expected]


def test_a_message_that_cannot_be_read_stops_nobody(fleet: TestFleet) -> None:
    fleet.broker.client.lpush("cpu", "this is no JSON", '{"properties": 5}')
    task = submit(fleet.echo(output=1), app=fleet.app)
    fleet.start_worker("w1")

    assert task.get(timeout=patient(30))["output"] == 1
    eventually(lambda: fleet.broker.client.llen("gpuflow.unreadable") == 2)


def test_a_global_prefix_stands_before_every_key(fleet: TestFleet) -> None:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.settings import Settings

    env = {"REDIS_URL": fleet.broker.url, "GPUFLOW_KEY_PREFIX": "t1:", "RESULTS_DIR": str(fleet.results)}
    app = GPUFlow("gpuflow", settings=Settings.load(env=env, cwd=fleet.folder))
    fleet.start_worker("w1", env={"GPUFLOW_KEY_PREFIX": "t1:"})

    task = submit(fleet.echo(output=1), app=app)

    assert task.get(timeout=patient(30))["output"] == 1
    keys = fleet.broker.client.keys("*")
    assert keys and all(key.startswith("t1:") for key in keys), [key for key in keys if not key.startswith("t1:")]
    app.close()
    app.redis.close()
