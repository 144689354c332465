"""A fleet as records in Redis alone, of any size, for the pages of the monitor; and a real Flower that shows it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from gpuflow.broker.priorities import list_key
from gpuflow.client import submit, submit_pipeline
from gpuflow.fleet.desired import DesiredState
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.scaling.store import Machine
from tests.support.fleet import TestFleet, keep_log
from tests.support.waiting import eventually, patient

LOGIN: Final = "ana:a word"
#: A name that is markup, and would be script.
HOSTILE: Final = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
_KINDS: Final = (("a100", 80, 4), ("rtx4090", 24, 2), ("h100", 80, 8), ("", 0, 0))


class FlowerProcess:
    """One `celery -A gpuflow flower` process with these options; `url` is its address. A context manager."""

    def __init__(
        self, fleet: TestFleet, name: str = "flower", *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.log_path = fleet.folder / f"{name}.log"
        keep_log(self)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWER_")}
        environment = {
            **kept,
            "REDIS_URL": str(fleet.settings.redis_url),
            "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir),
            "FLOWER_BASIC_AUTH": LOGIN,
            **(env or {}),
        }
        if not environment["FLOWER_BASIC_AUTH"]:  # Flower takes an empty one for a login
            del environment["FLOWER_BASIC_AUTH"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "celery",
                    "-A",
                    "gpuflow",
                    "flower",
                    "--address=127.0.0.1",
                    "--port=0",
                    *options,
                ],
                env=environment,
                cwd=fleet.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.url = eventually(self._address, within=60, what="the address of Flower")
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        if self.process.poll() is not None:
            raise AssertionError(f"Flower ended with {self.process.returncode}: {self.log_path.read_text()[-2000:]}")
        found = re.search(r'Visit me at (http://[^\s"]+)', self.log_path.read_text(errors="replace"))
        return found[1].rstrip("/") if found else ""

    def client(self, login: str | None = LOGIN) -> httpx.Client:
        auth = httpx.BasicAuth(*login.split(":", 1)) if login else None
        return httpx.Client(base_url=self.url, auth=auth, timeout=patient(30))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patient(10))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(patient(10))

    def __enter__(self) -> FlowerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_workers(fleet: TestFleet, count: int) -> None:
    """Announce workers that nobody runs: of all states, with GPUs in all uses, some of a hostile name."""
    registry = Fleet(fleet.app.redis, fleet.app.keys)
    for number in range(count):
        entry = worker_entry(number)
        registry.announce(entry)
        heartbeat = fleet.app.keys.heartbeat(entry.id)
        if number % 13 == 4:  # overdue
            late = 3 * entry.interval_seconds
            registry.announce(dataclasses.replace(entry, heartbeat_at=entry.heartbeat_at - late))
            fleet.app.redis.pexpire(heartbeat, int((entry.timeout_seconds - late) * 1000))
        elif number % 50 == 21:
            fleet.app.redis.delete(heartbeat)
    for number in range(0, count, 7):
        registry.desire(worker_id(number), DesiredState.DISABLED, reason="its fan is loud")


def worker_id(number: int) -> str:
    return f"gpu-box-{number:03d}"


def worker_entry(number: int) -> WorkerEntry:
    name, vram_gb, gpu_count = _KINDS[number % len(_KINDS)]
    uuids = [f"GPU-{number:04d}-{index}" for index in range(gpu_count)]
    total = vram_gb * 1024
    busy = number % 3 == 0
    state = (WorkerState.BUSY if busy else WorkerState.IDLE) if number % 11 else WorkerState.DRAINING
    return WorkerEntry(
        id=worker_id(number),
        state=state,
        hostname=HOSTILE if number % 100 == 3 else f"rack{number // 20}-node{number % 20}.example",
        node=f"{worker_id(number)}@host",
        capability={
            "schema": 1,
            "cpu_count": 32,
            "memory_mib": 128 * 1024,
            "labels": {"team": "nlp" if number % 2 else "vision", "location": "eu-west", "spot": ""},
            "gpus": [
                {"uuid": uuid, "index": index, "names": [name], "vram_gb": vram_gb, "total_mib": total}
                for index, uuid in enumerate(uuids)
            ],
        },
        queues=("gpuflow.control", "tasks"),
        class_name=f"class-{number % len(_KINDS)}",
        tasks=tuple(f"task-{number}-{index}" for index in range(6)) if busy else (),
        load={
            "families": None,
            "freeGpus": uuids[1:] if busy else uuids,
            "roomMib": {},
            "foreignMib": {uuids[-1]: total // 5} if gpu_count and number % 5 == 0 else {},
            "gpus": {uuid: {"freeMib": total // (1 + index % 3), "utilizationPercent": 30 * (index % 4)}
                     for index, uuid in enumerate(uuids)},
            "diskFreeMib": 500_000,
            "jobs": 6 if busy else 0,
        },
        started_at=time.time() - 3600,
        heartbeat_at=time.time() - 3,
        interval_seconds=600,
        timeout_seconds=36_000,
        version="0.1.0",
    )  # fmt: skip


def write_queues(fleet: TestFleet, queues: int, depth: int) -> None:
    """Fill queues of different asks, `depth` messages altogether: of each a task, and copies of its message."""
    for number in range(queues):
        ask = [{"gpu": {"type": "a100", "count": 1 + number % 4}}, {"gpu": {"type": "h100", "count": 1 + number % 8}},
               {"cpu": str(1 + number % 30)}][number % 3]  # fmt: skip
        labels = {"location": f"eu-{'w' * (number % 4)}*"} if number % 2 else {}
        task = submit(
            {"taskType": "echo", "echo": {"message": "x"}, "resources": {"hardware": ask, "labels": labels}},
            app=fleet.app,
        )
        queue = fleet.app.ledger.get(task.id).queue
        key = f"{fleet.app.keys.prefix}{list_key(queue, None)}"
        client: Any = fleet.app.redis
        message = client.lindex(key, -1)
        client.lpush(key, *[message] * max(1, depth // queues))


def write_pipelines(fleet: TestFleet, count: int) -> list[str]:
    """Submit pipelines that nobody runs, the first one of a hostile name; return their ids."""
    stages = [
        {"name": "prepare", "spec": fleet.echo(message="a")},
        {"name": "tune", "spec": fleet.echo(message="${prepare.result.message}")},
        {"name": "ask", "spec": fleet.echo(message="${tune.result.message}")},
    ]
    found = []
    for number in range(count):
        name = HOSTILE if number == 0 else f"support-bot-{number}"
        run = submit_pipeline(
            {"apiVersion": "gpuflow/v1", "metadata": {"name": name, "owner": "ana"},
             "spec": {"taskType": "echo", "stages": stages}}, app=fleet.app,
        )  # fmt: skip
        found.append(run.id)
    return found


def write_run(fleet: TestFleet, pipeline_id: str) -> None:
    """Let the first stage of a pipeline look as if it had run: events with losses and a log."""
    app = fleet.app
    app.event_log.append(pipeline_id, {"event": "log", "message": f"a line of {HOSTILE}"}, 10_000)
    app.pipeline_controller.reconcile(pipeline_id)
    with contextlib.suppress(StopIteration):
        record = app.pipelines.get(pipeline_id)
        task = next(task for stage in record.stages.values() for task in stage.tasks)
        for step in range(1, 61):
            loss = 2.5 / step**0.5 + 0.05 * (step % 5)
            app.event_log.append(
                task, {"event": "progress", "current": step, "total": 60, "unit": "step", "metrics": {"loss": loss}},
                10_000,
            )  # fmt: skip


def write_scaling(fleet: TestFleet, machines: int) -> None:
    """Let a beat lead that has launched machines, one of each three of them spot, and failed to launch another."""
    client, keys, now = fleet.app.redis, fleet.app.keys, time.time()
    client.hset(keys.scaling_leader, mapping={"owner": "beat-1", "epoch": 3, "until": now + 3600})
    for number in range(machines):
        machine = Machine(
            id=f"gpuflow-a100-{number:04d}",
            family="a100-spot" if number % 3 == 0 else "a100",
            state="launching" if number % 5 == 0 else "running",
            wanted_at=now - 60 * number,
            spot=number % 3 == 0,
            cost_per_hour=0.7 * (1 + number % 3),
        )
        client.hset(keys.machines, machine.id, machine.to_json())
        who = HOSTILE if number == 1 else "nobody"
        why = f"{3 + number} tasks wait for gpu-a100, the oldest for {number} min; {who} serves it"
        told = {
            "at": now - 60 * number,
            "action": "launch",
            "machine": machine.id,
            "family": machine.family,
            "reason": why,
        }
        client.rpush(keys.scaling_decisions, json.dumps(told))


def write_dead_letters(fleet: TestFleet, count: int) -> None:
    """Put tasks among the dead letters, and as many messages that nobody could read beside them."""
    client, keys, now = fleet.app.redis, fleet.app.keys, time.time()
    for number in range(count):
        template = {**fleet.echo(message="x"), "resources": {"labels": {"no": "such"}}}
        name = HOSTILE if number == 0 else f"tune-{number}"
        task = submit({"apiVersion": "gpuflow/v1", "metadata": {"name": name}, "spec": template}, app=fleet.app)
        error = {"type": "OutOfMemory", "message": f"CUDA out of memory: tried to allocate {number}.0 GiB; {HOSTILE}"}
        fields = {"state": "DEAD", "attempt": 3, "error": json.dumps(error), "finished_at": now - 60 * number}
        client.hset(keys.task(task.id), mapping=fields)
        client.zadd(keys.dead, {task.id: now - 60 * number})
        told = {"at": now - 60 * number, "list": "tasks", "why": "it is not JSON", "message": f"{{{HOSTILE}"}
        client.rpush(keys.unreadable, json.dumps(told))


__all__ = [
    "HOSTILE",
    "LOGIN",
    "FlowerProcess",
    "worker_entry",
    "worker_id",
    "write_dead_letters",
    "write_pipelines",
    "write_queues",
    "write_run",
    "write_scaling",
    "write_workers",
]
