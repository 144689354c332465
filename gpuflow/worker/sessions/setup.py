"""Joins a worker's sessions with its leases, its GPUs, and the other workers of its machine. For the boot steps."""

from __future__ import annotations

from redis.exceptions import RedisError

from gpuflow.broker.lease_table import LeaseTable
from gpuflow.logs import get_logger
from gpuflow.settings import Settings
from gpuflow.worker.admission import Admission
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.sessions.neighbours import Neighbours
from gpuflow.worker.sessions.table import Sessions
from gpuflow.worker.sessions.view import forget_views

log = get_logger("gpuflow.sessions")


def make_sessions(settings: Settings, table: LeaseTable, gpus: MachineGpus, worker_id: str) -> Sessions | None:
    """Return the sessions of a worker, none open yet; None where the settings keep no model loaded."""
    if not settings.session_idle_seconds:
        return None

    forget_views(settings, worker_id)

    def look_again() -> None:
        try:
            table.wake(machine=True)
        except RedisError as error:
            log.debug("not_woken", cause=str(error))

    return Sessions(
        idle_seconds=settings.session_idle_seconds,
        log_dir=settings.state_dir / "sessions" / worker_id,
        log_max_bytes=settings.child_max_log_bytes,
        release=gpus.release,
        on_change=look_again,
    )


def yield_to(neighbours: Neighbours, admission: Admission) -> None:
    """Close idle sessions for a task of another worker of the machine, if there is one that they would help."""
    asked = neighbours.wished()
    if asked is not None and asked.gpu_count:
        admission.make_room(asked, "another worker of this machine needs its GPUs")
