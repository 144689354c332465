"""Simulated workers for fleet_scale.py: the classes of a real worker on a real broker, without Celery and children.

One process holds many of them. Each has its own connection, channel, lease table with its keeper, queue matcher,
admission, GPU locks (a lock directory for each "machine") and presence thread: those of `gpuflow.worker`, unchanged. A
task is taken, begun, reported on and committed by the ledger, and acknowledged; instead of a child there is a pause.

    python fleet_clients.py URL FOLDER FIRST COUNT

Reads words from standard input: `closed`, `open`, `pause <seconds>`, `report`; each is answered by one line of JSON.
The end of the input ends all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kombu import Consumer, Exchange, Queue

from gpuflow.broker.lease_table import LeaseTable
from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.disk import free_mib
from gpuflow.fleet.gpu_usage import GpuUsage, UsageReader
from gpuflow.fleet.hardware import Gpu, Hardware
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.settings import Settings
from gpuflow.worker.admission import Admission
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.presence import PresenceThread
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.runtime import Runtime
from gpuflow.worker.slots import Limits

#: The machines of the fleet take turns: each has one of these GPUs (name as NVML tells it, MiB), or none.
MACHINES: tuple[tuple[str, int] | None, ...] = (
    None,
    ("NVIDIA A100-SXM4-80GB", 81920),
    ("NVIDIA H100 80GB HBM3", 81559),
    ("NVIDIA GeForce RTX 4090", 24564),
    ("Tesla T4", 15360),
)
#: What to ask for to get each of them.
ACCELERATORS: tuple[str | None, ...] = (None, "A100", "H100", "RTX4090", "T4")
MEMORY_MIB = 262_144
#: Celery's entry of a task that has begun.
STARTED = '{"status": "STARTED", "result": null}'


class IdleDriver(UsageReader):
    """A driver whose GPUs nobody else uses."""

    def read(self, promised_mib: Mapping[str, int | None], wait_seconds: float, **_: Any) -> dict[str, GpuUsage] | None:
        """Return that nothing is on the GPUs."""
        return {uuid: GpuUsage(uuid=uuid, total_mib=81_920) for uuid in promised_mib}


def hardware_of(number: int) -> Hardware:
    """Return the machine of one worker."""
    kind = MACHINES[number % len(MACHINES)]
    gpus = ()
    if kind is not None:
        name, mib = kind
        gpus = (Gpu(index=0, uuid=f"GPU-{number:08d}", name=name, total_mib=mib, free_mib=mib),)
    return Hardware(
        gpus=gpus,
        cpu_count=16,
        memory_total_mib=MEMORY_MIB,
        memory_available_mib=MEMORY_MIB,
        hostname=f"sim-{number}",
    )


class NoSupportedRuntimes:
    """Stands in for what a worker offers: it runs no child, and many of them share one process."""

    secrets: tuple[str, ...] = ()

    def look(self) -> None:
        pass

    def to_dict(self) -> dict[str, Any]:
        return {}


class SimulatedWorker:
    """One worker. `taken` gets (task id, Unix seconds) for each message that it takes."""

    def __init__(self, app: GPUFlow, folder: Path, number: int, taken: list[tuple[str, float]]) -> None:
        name = f"sim-{number}"
        hardware = hardware_of(number)
        capability = Capability.of(hardware, disk_free_mib=free_mib(folder))
        gpus = MachineGpus(capability.gpus, folder / "locks" / name, reader=IdleDriver())
        table = LeaseTable(app.keys, app.settings.lease_seconds, member=name)
        self.limits = Limits(max_jobs=1)
        self.admission = table.gate = Admission(
            QueueMatcher(app.redis, app.keys, capability),
            self.limits,
            gpus,
            Reserving(gpus, app.redis, app.keys, name),
        )
        self.app, self.name, self.table, self.taken = app, name, table, taken
        self.runtime = Runtime(
            app=app,
            worker_id=name,
            hardware=hardware,
            labels={},
            leases=table,
            admission=self.admission,
            machine_gpus=gpus,
            supported_runtimes=NoSupportedRuntimes(),
            connected=True,
        )
        self.pause_seconds = 0.0
        self.done = 0
        self._running: tuple[Any, Holder, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._presence = PresenceThread(self.runtime, f"{name}@{hardware.hostname}")

    def start(self) -> None:
        """Begin to beat and to take."""
        self._presence.start()
        self._thread.start()

    def stop(self) -> None:
        """End; to be called for all workers of a process before they are joined."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the end, and leave the registry."""
        self._thread.join(timeout=5)
        with contextlib.suppress(Exception):
            self._presence.stop()
            self.table.close()

    def take_jobs(self, *, wanted: bool) -> None:
        """Take jobs from now on, or none."""
        self.limits.max_jobs = 1 if wanted else 0
        if wanted:
            self.table.wake()

    def _run(self) -> None:
        self.admission.matcher.enlist()
        with self.app.connection_for_read() as connection:
            channel = connection.channel()
            channel._own_leases = self.table
            queues = [
                Queue(name, Exchange(name), routing_key=name, channel=channel)
                for name in (self.app.settings.task_topic, CONTROL_QUEUE)
            ]
            with Consumer(channel, queues, on_message=self._begin, accept=["json"]):
                while not self._stop.is_set():
                    left = 1.0 if self._running is None else self._running[2] - time.monotonic()
                    with contextlib.suppress(socket.timeout):
                        connection.drain_events(timeout=max(0.001, min(1.0, left)))
                    if self._running is not None and time.monotonic() >= self._running[2]:
                        self._end()

    def _begin(self, message: Any) -> None:
        task, tag = message.headers["id"], message.delivery_tag
        self.taken.append((task, time.time()))
        self.admission.keep(tag)
        verdict = self.app.ledger.start(
            task, worker=self.name, owner_token=self.table.owner, tag=tag, returned=self.table.returned(tag)
        )
        if verdict.verdict != "begin":
            raise SystemExit(f"{task} was not begun: {verdict}")
        holder = Holder(attempt=verdict.attempt, token=self.table.owner)
        self.table.begin(tag, task, verdict.attempt)
        self.table.start(tag)
        self.runtime.running[task] = self.runtime  # type: ignore[assignment]  # its name alone matters
        self.app.ledger.report(task, holder, ['{"event": "started"}'], celery_meta=STARTED)
        self._running = message, holder, time.monotonic() + self.pause_seconds

    def _end(self) -> None:
        assert self._running is not None
        message, holder, _ = self._running
        self._running = None
        task, tag = message.headers["id"], message.delivery_tag
        self.admission.child_gone(tag)
        self.table.wake()
        self.runtime.running.pop(task, None)
        self.app.ledger.commit(task, TaskState.SUCCEEDED, holder=holder, result={"items": []})
        self.app.backend.store_result(task, {"items": []}, "SUCCESS")
        message.ack()
        self.admission.release(tag)
        self.done += 1


def main() -> None:
    """Run the workers until the input ends."""
    url, folder, first, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level=logging.ERROR)
    settings = Settings.load(
        env={**os.environ, "REDIS_URL": url, "RESULTS_DIR": str(folder), "GPUFLOW_STATE_DIR": str(folder)}, cwd=folder
    )
    app = GPUFlow("fleet", settings=settings)
    taken: list[tuple[str, float]] = []
    workers = [SimulatedWorker(app, folder, number, taken) for number in range(first, first + count)]
    for worker in workers:
        worker.start()
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        for worker in workers:
            if word in ("open", "closed"):
                worker.take_jobs(wanted=word == "open")
            elif word == "pause":
                worker.pause_seconds = float(value)
        seen, taken[:] = list(taken), []
        print(json.dumps({"done": sum(worker.done for worker in workers), "taken": seen}), flush=True)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
