"""What one worker process is: its identity, capability, admission and running attempts. Built once at its start.

The boot steps build it, the pool and the supervisor use it through `current()`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from gpuflow.audit.actors import acts_as_process
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.hardware import Hardware
from gpuflow.fleet.registry import Fleet
from gpuflow.worker.admission import Admission
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.outcome import StopReason
from gpuflow.worker.spec_policy import SpecPolicy, policy_of
from gpuflow.worker.supported_runtimes import SupportedRuntimes
from gpuflow.worker.task_limits import TaskLimits

if TYPE_CHECKING:
    from gpuflow.worker.presence import PresenceThread
    from gpuflow.worker.stopping import Stopper
    from gpuflow.worker.systemd import SystemdWatch


class Stoppable(Protocol):
    """An attempt, or its preparation."""

    def stop(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop it; the first reason counts."""


@dataclass(kw_only=True)
class Runtime:
    """The worker of this process."""

    app: GPUFlow
    worker_id: str
    hardware: Hardware
    labels: Mapping[str, str]
    leases: LeaseTable
    admission: Admission
    machine_gpus: MachineGpus
    ephemeral: bool = False
    executors: tuple[str, ...] | None = None
    user_types: tuple[str, ...] = ()
    supported_runtimes: SupportedRuntimes
    limits: TaskLimits = field(default_factory=TaskLimits)
    asked_queues: tuple[str, ...] | None = None
    running: dict[str, Stoppable] = field(default_factory=dict)
    #: The threads whose task has begun its attempt.
    begun: set[int] = field(default_factory=set)
    connected: bool = False
    #: The consumer waits for the broker, or for its login.
    connecting: bool = False
    presence: PresenceThread | None = None
    stopper: Stopper | None = None
    systemd: SystemdWatch | None = None
    stopping: StopReason | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def policy(self) -> SpecPolicy:
        """What this worker allows tasks."""
        return policy_of(self.app.settings, self.worker_id)

    @cached_property
    def fleet(self) -> Fleet:
        """The registry of workers."""
        return Fleet(self.app.redis, self.app.keys)

    def begin(self, task_id: str, attempt: Stoppable) -> None:
        """Note a running attempt, so that it can be stopped by its task id; stop it if all are stopped already."""
        self.begun.add(threading.get_ident())
        with self.lock:
            self.running[task_id] = attempt
            stopping = self.stopping
        if stopping is not None:
            attempt.stop(stopping)

    def end(self, task_id: str) -> None:
        """Forget a running attempt."""
        with self.lock:
            self.running.pop(task_id, None)

    def stop(self, task_id: str, reason: StopReason, *, at_once: bool = False) -> bool:
        """Stop the attempt of a task; False if this worker runs none."""
        with self.lock:
            attempt = self.running.get(task_id)
        if attempt is None:
            return False
        attempt.stop(reason, at_once=at_once)
        return True

    def stop_all(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop every running attempt, and those that are still being prepared; the worker comes to its end."""
        with self.lock:
            self.stopping = reason
            attempts = list(self.running.values())
        for attempt in attempts:
            attempt.stop(reason, at_once=at_once)

    def stop_replicas(self) -> None:
        """Let the replicas of served models go elsewhere, those that are still being prepared too."""
        leases = self.leases.held()
        for tag in self.admission.replicas():
            if tag in leases and leases[tag].task:
                self.stop(leases[tag].task, "preempted")

    def tasks_on(self, uuid: str) -> list[str]:
        """Return the ids of the running tasks that hold a GPU."""
        leases = self.leases.held()
        return [leases[tag].task for tag in self.admission.tags_on(uuid) if tag in leases and leases[tag].task]

    def close(self) -> None:
        """Leave the registry and let go of all leases; the last thing that a worker does."""
        if self.admission.sessions is not None:
            self.admission.sessions.stop(self.app.settings.grace_seconds)
        if self.presence is not None:
            self.presence.stop()
            self.presence = None
        self.leases.close()


class _Process:
    runtime: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make `runtime` the worker of this process."""
    acts_as_process(f"worker:{runtime.worker_id}")
    _Process.runtime = runtime


def find() -> Runtime | None:
    """Return the worker of this process, or None outside a worker."""
    return _Process.runtime


def current() -> Runtime:
    """Return the worker of this process. Raises GPUFlowError outside a gpuflow worker."""
    if _Process.runtime is None:
        raise GPUFlowError("gpuflow tasks run in a gpuflow worker alone; start one with `celery -A gpuflow worker`")
    return _Process.runtime
