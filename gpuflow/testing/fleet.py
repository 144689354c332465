"""The workers of a test: real processes, each on a machine without GPUs or with simulated ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from redis.exceptions import RedisError

from gpuflow.cli.logs import stored
from gpuflow.client import Task
from gpuflow.cluster.commands import process_environment, worker_command
from gpuflow.cluster.process import ManagedProcess
from gpuflow.errors import GPUFlowError
from gpuflow.event_text import message
from gpuflow.fleet.registry import Fleet, WorkerState
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import FINAL
from gpuflow.settings import Settings
from gpuflow.testing.environment import for_worker, import_path
from gpuflow.testing.simulated_gpus import SimGpu, gpu_uuid, machine_gpus, mig_uuid, simulated_machine, write_machine

if TYPE_CHECKING:
    from gpuflow.testing.server import TestServer

_T = TypeVar("_T")

_POLL_SECONDS: Final = 0.02
_TAIL_LINES: Final = 40
#: SIGQUIT is Celery's cold stop: children are stopped. Each with the seconds that it is given.
_STOP_SIGNALS: Final = ((signal.SIGQUIT, 10.0), (signal.SIGTERM, 2.0))


class SimulatedMachine:
    """A machine of a test; workers on the same one share its GPUs.

    `uuids`: those of its GPUs and MIG slices, as CUDA_VISIBLE_DEVICES names them. `env` gives it to a process.
    """

    def __init__(self, folder: Path, gpus: str | Sequence[str | SimGpu], library: Path | None) -> None:
        self._state = folder / "nvml.state"
        folder.mkdir(parents=True)
        self.uuids: list[str] = []
        self.env = {"GPUFLOW_LOCK_DIR": str(folder / "locks")}
        if library is not None:
            self.env |= simulated_machine(folder, gpus, library)
            self.become(gpus)

    def become(self, gpus: str | Sequence[str | SimGpu], *, hang_ms: int = 0) -> None:
        """Change the machine under its workers: with `SimGpu(lost=True)`, for instance, a GPU is lost.

        With `hang_ms` every call of the driver takes so long.
        """
        write_machine(self._state, gpus, hang_ms=hang_ms)
        self.uuids = []
        for index, gpu in enumerate(machine_gpus(gpus)):
            slices = [mig_uuid(index, number) for number in range(len(gpu.slices))]
            self.uuids += slices or [gpu.uuid or gpu_uuid(index)]


class TestWorker:
    """One `celery -A gpuflow worker` process of a test."""

    __test__ = False

    def __init__(self, name: str, machine: SimulatedMachine, process: ManagedProcess) -> None:
        self.name = name
        self.machine = machine
        self.process = process
        #: Whether the test has ended it: one that ends by itself makes the test fail.
        self.stopped = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Its log."""
        return self.process.log.read_text(encoding="utf-8", errors="replace") if self.process.log.is_file() else ""

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self.process.log_tail(_TAIL_LINES)

    def stop(self) -> None:
        """End it as a cold stop does: its tasks go back to their queues."""
        self.stopped = True
        self.process.stop()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL to it and all that it has started."""
        self.stopped = True
        self.process.kill()


class TestFleet:
    """The app, pointed at an empty server, and the workers that a test starts; all of them end with the block."""

    __test__ = False

    def __init__(self, server: TestServer) -> None:
        self.app = server.app
        self.url = server.url
        self.timeout = server.timeout
        self.workers: list[TestWorker] = []
        self._server = server
        self._registry = Fleet(self.app.redis, self.app.keys)
        self._machines = 0

    def machine(self, gpus: str | Sequence[str | SimGpu] = "") -> SimulatedMachine:
        """Return a new machine: "2x A100-80GB", "T4 + L4", a list of these names and of SimGpu, or "" without a GPU.

        Raises GPUFlowError for an unknown GPU, and where the driver cannot be simulated.
        """
        library = self._server.library if machine_gpus(gpus) else None
        self._machines += 1
        return SimulatedMachine(self._server.folder / "machines" / str(self._machines), gpus, library)

    def start_worker(
        self,
        *include: str,
        machine: str | Sequence[str | SimGpu] | SimulatedMachine = "",
        queues: str | Sequence[str] = (),
        max_jobs: int | None = None,
        name: str = "",
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> TestWorker:
        """Start a worker with the tasks of these modules, and return it when it serves.

        `machine`: as `machine()` takes it, or one of its machines, for workers that share their GPUs. `queues`: `-Q`;
        by default `tasks`. `options`: further ones of `celery -A gpuflow worker`. `env`: variables of its own.
        `folder`: where it runs, by default the current folder. Raises GPUFlowError, with the end of its log, where
        it ends instead.
        """
        place = machine if isinstance(machine, SimulatedMachine) else self.machine(machine)
        worker_id = name or f"w{len(self.workers) + 1}"
        # Without GPUs of its own it takes none of this machine.
        gpus = None if place.uuids else ""
        argv = worker_command(worker_id, log_level="INFO", max_jobs=max_jobs, gpus=gpus)
        for module in include:
            argv += ["--include", module]
        if queues:
            argv += ["-Q", queues if isinstance(queues, str) else ",".join(queues)]
        at = Path(folder or Path.cwd()).absolute()
        process = ManagedProcess(
            worker_id,
            [*argv, *options],
            environment=self._environment(place, env or {}, at),
            folder=at,
            log=self._server.folder / "logs" / f"{worker_id}.log",
            stop_signals=_STOP_SIGNALS,
        )
        worker = TestWorker(worker_id, place, process)
        self.workers.append(worker)
        self.wait_for(lambda: self._serves(worker), what=f"worker {worker_id} in the registry")
        return worker

    def wait_for(self, condition: Callable[[], _T], *, within: float | None = None, what: str = "the condition") -> _T:
        """Return the first true value of a condition. Raises AssertionError after `within` seconds, with the last one.

        Raises GPUFlowError at once, with the end of its log, where a worker has ended by itself. An error of the broker
        is a value that is not true.
        """
        limit = self.timeout if within is None else within
        give_up_at = time.monotonic() + limit
        while True:
            try:
                value: Any = (found := condition())
                if found:
                    return found
            except RedisError as error:
                value = error
            for worker in self.workers:
                if not worker.stopped and not worker.process.alive:
                    worker.stopped = True
                    raise GPUFlowError(
                        f"worker {worker.name} ended with exit code {worker.process.exit_code}:\n{worker.log_tail()}"
                    )
            if time.monotonic() > give_up_at:
                raise AssertionError(f"{what}: not true within {limit:g} s; the last value is {value!r}")
            time.sleep(_POLL_SECONDS)

    def wait(self, task: Any, *states: str, within: float | None = None) -> TaskRecord:
        """Wait until a task is in one of these states, by default in any final one, and return its record.

        `task`: what `delay` or `submit` has returned, or an id. Raises AssertionError, with the log of the task, where
        it is not, or can no longer be. A task in a thread has no record: wait for it by its result.
        """
        wanted = states or tuple(FINAL)

        def reached() -> TaskRecord | None:
            record = self.record(task)
            return record if record is not None and record.state in (*wanted, *FINAL) else None

        try:
            found = self.wait_for(reached, within=within, what=f"task {_id(task)} in {' or '.join(wanted)}")
        except AssertionError as error:
            seen = self.record(task)
            told = f"it is {seen.state}" if seen else "it has no record: a task in a thread has none"
            raise AssertionError(f"{error}; {told}\n{self.log(task)}".rstrip()) from None
        assert found is not None  # noqa: S101  (a value that is true)
        if found.state not in wanted:
            raise AssertionError(f"task {found.id} is {found.state}: {found.error}\n{self.log(task)}".rstrip())
        return found

    def record(self, task: Any) -> TaskRecord | None:
        """Return the record of a task; None where it has none."""
        return self.app.ledger.find(_id(task))

    def log(self, task: Any) -> str:
        """Return what a task has told and printed, as `gpuflow logs` does; empty where it has no record."""
        if self.record(task) is None:
            return ""
        events = stored(self.app, Task(_id(task), self.app))
        lines = (message(event.name, event.data) for event in events)
        return "\n".join(line for line in lines if line is not None)

    def close(self) -> None:
        """End all workers and what they run."""
        running = [worker for worker in self.workers if worker.process.alive]
        for worker in running:
            worker.stopped = True
            worker.process.ask()
        with contextlib.ExitStack() as stack:  # what one raises keeps no other from its end
            for worker in self.workers:
                stack.callback(worker.stop)

    def _serves(self, worker: TestWorker) -> bool:
        entry = self._registry.find(worker.name)
        return entry is not None and entry.pid == worker.pid and entry.state in (WorkerState.IDLE, WorkerState.BUSY)

    def _environment(self, machine: SimulatedMachine, env: Mapping[str, str], folder: Path) -> dict[str, str]:
        settings = self._server.environment
        base = {**for_worker(os.environ), **settings, **machine.env, "PYTHONPATH": import_path(), **env}
        loaded = Settings.load(env=base, cwd=folder)
        return process_environment(loaded, self.url, base, folder, own_broker=True)


def _id(task: Any) -> str:
    return task if isinstance(task, str) else str(task.id)
