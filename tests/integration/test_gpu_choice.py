"""Which worker takes which message: by task type, by the model that it has, by cost and fit; real workers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from gpuflow.client import Task
from gpuflow.routing.affinity import model_key
from tests.support.boxes import Box, waits
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

PATIENCE_SECONDS = 4.0
COMMAND: dict[str, Any] = {"taskType": "command", "command": {"command": "true"}}
MODEL = {"source": {"type": "huggingface", "identifier": "team/model"}}


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One broker for all tests of this file."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), env={"GPUFLOW_MODEL_PATIENCE_SEC": str(PATIENCE_SECONDS)})
    try:
        yield made
    finally:
        made.close()


def ended(task: Task) -> Any:
    return eventually(lambda: (record := task.record()).state.final and record, within=90, what=f"the end of {task.id}")


def both_tell(box: Box, accelerators: str) -> None:
    """Have tasks until both classes of workers have said how well they suit: who looks just then hears no doorbell."""

    def told() -> bool:
        task = box.submit(accelerators)
        ended(task)
        return int(box.fleet.app.redis.zcard(box.fleet.app.keys.queue_classes(task.record().queue))) == 2

    eventually(told, what="both say how well they suit")


def woken(accelerators: str, *boxes: Box) -> str:
    """Submit a task while one idle worker in each box waits for its doorbell; return who is rung, and takes it.

    The workers are stopped for it: an idle one looks by itself now and then, and may be the first to see the task.
    """
    fleet, workers = boxes[0].fleet, {box.workers[0].name: box.workers[0] for box in boxes}
    classes = {name: entry.class_name for name in workers if (entry := fleet.registry.find(name)) is not None}

    def waiting() -> set[str]:
        return {name for name in workers if fleet.app.redis.scard(fleet.app.keys.waiters(classes[name]))}

    def stopped() -> bool:
        for worker in workers.values():
            worker.send(signal.SIGSTOP)
        eventually(lambda: all(psutil.Process(one.pid).status() == psutil.STATUS_STOPPED for one in workers.values()))
        if waiting() == set(workers):
            return True
        for worker in workers.values():
            worker.send(signal.SIGCONT)
        return False

    try:
        eventually(stopped, what="both wait for a doorbell")
        task = boxes[0].submit(accelerators)
        (rung,) = set(workers) - waiting()
        workers[rung].send(signal.SIGCONT)
        assert ended(task).worker == rung
        return rung
    finally:
        for worker in workers.values():
            worker.send(signal.SIGCONT)


# -- executors --------------------------------------------------------------------------------------------------


def test_a_worker_of_some_executors_takes_their_tasks_alone_and_is_not_held_up_by_others(gpus: TestFleet) -> None:
    with Box(gpus, "choosy", "1xA100-80GB+1xL4") as box:
        box.start("choosy", "--executors", "command")
        # More queues than are looked into at once, and both kinds of GPU, hold nothing for it at first.
        echoes = [box.submit(more={"hardware": {"cpu": part / 100}}) for part in range(1, 12)]
        echoes += [box.submit("A100:1") for _ in range(3)]

        behind = box.submit("A100:1", **COMMAND)
        of_another_gpu = box.submit("L4:1", **COMMAND)
        of_another_queue = box.submit(more={"hardware": {"cpu": 1}}, **COMMAND)

        assert [ended(task).worker for task in (behind, of_another_gpu, of_another_queue)] == ["choosy"] * 3
        assert waits(*echoes)
        assert box.kinds(echoes[0]) == {"choosy": "no_executor"}
        told = "\n".join(box.explained(echoes[0]).to_lines())
        assert "has no executor echo: it was started with --executors command" in told

        box.start("any")
        assert {ended(task).worker for task in echoes} == {"any"}


@pytest.mark.parametrize("given", ["inference,nonsense", ","])
def test_an_unknown_executor_stops_the_start(gpus: TestFleet, given: str) -> None:
    name = f"bad-{len(given)}"
    worker = WorkerProcess(gpus.broker.url, gpus.folder, name, "--executors", given)

    assert worker.process.wait(timeout=patient(30)) == 2
    assert "is no task type; give some of echo, inference" in worker.log()
    assert "Traceback" not in worker.log()


# -- models -----------------------------------------------------------------------------------------------------


def test_tasks_go_to_the_worker_that_has_their_model_for_a_while(gpus: TestFleet) -> None:
    with Box(gpus, "models", "2xA100-80GB") as box:
        box.start("warm")
        assert ended(box.submit("A100:1", model=MODEL)).worker == "warm"
        warm_key = gpus.app.keys.warm(model_key({"model": MODEL}))
        eventually(lambda: gpus.app.redis.get(warm_key) == "warm", what="the worker tells of its model")
        box.start("cold")

        # One after the other: none waits longer than the patience because the machine is slow.
        assert [ended(box.submit("A100:1", model=MODEL)).worker for _ in range(4)] == ["warm"] * 4

        # A task without a model is anybody's; one whose worker has gone waits no longer than the patience.
        box.workers[0].process.kill()
        other = ended(box.submit("A100:1"))
        orphan = ended(box.submit("A100:1", model=MODEL))
        assert (other.worker, orphan.worker) == ("cold", "cold")
        assert gpus.app.redis.exists(warm_key), "the key outlives the worker, which was killed"
        assert orphan.started_at - orphan.created_at >= PATIENCE_SECONDS * 0.9


def test_a_worker_that_stops_leaves_its_models_to_others_at_once(gpus: TestFleet) -> None:
    other_model = {"source": {"type": "huggingface", "identifier": "team/other"}}
    with Box(gpus, "leaver", "1xA100-80GB") as box:
        box.start("leaver")
        assert ended(box.submit("A100:1", model=other_model)).worker == "leaver"
        warm_key = gpus.app.keys.warm(model_key({"model": other_model}))
        eventually(lambda: gpus.app.redis.exists(warm_key), what="the worker tells of its model")

        box.workers[0].stop()

        assert not gpus.app.redis.exists(warm_key)


# -- cost and fit -----------------------------------------------------------------------------------------------


def test_the_cheaper_of_two_idle_machines_is_woken_and_the_dearer_serves_when_it_is_busy(gpus: TestFleet) -> None:
    with Box(gpus, "dear", "1xL4", label="priced") as dear, Box(gpus, "cheap", "1xL4", label="priced") as cheap:
        for worker in (dear.spawn("dear", "--cost", "3.5"), cheap.spawn("cheap", "--cost", "0.5")):
            worker.ready()
        both_tell(dear, "L4:1")

        assert [woken("L4:1", dear, cheap) for _ in range(4)] == ["cheap"] * 4

        both = [dear.hold("L4:1"), dear.hold("L4:1")]
        eventually(lambda: [task.state for task in both] == ["RUNNING"] * 2, what="both machines are used")
        assert {task.record().worker for task in both} == {"cheap", "dear"}


def test_the_smaller_gpu_is_woken_first(gpus: TestFleet) -> None:
    with Box(gpus, "big", "1xA100-80GB", label="sized") as big, Box(gpus, "small", "1xL4", label="sized") as small:
        for worker in (big.spawn("big"), small.spawn("small")):
            worker.ready()
        both_tell(big, "16GB+:1")

        assert [woken("16GB+:1", big, small) for _ in range(4)] == ["small"] * 4


def test_a_cost_below_zero_stops_the_start(gpus: TestFleet) -> None:
    worker = WorkerProcess(gpus.broker.url, gpus.folder, "negative", "--cost", "-1")

    assert worker.process.wait(timeout=patient(30)) == 2
    assert "--cost -1 is below 0" in worker.log()
    endless = WorkerProcess(gpus.broker.url, gpus.folder, "endless", "--cost", "1e7")
    assert endless.process.wait(timeout=patient(30)) == 2
    assert "--cost 1e+07 is no amount up to 1000000" in endless.log()
