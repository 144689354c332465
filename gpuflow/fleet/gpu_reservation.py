"""The reservation of a machine: GPUs that are kept free for one task that waits for several of them.

Used by the worker, which honours it and renews it. One file in the lock directory, read and written under the mutex
of the machine. A reservation whose worker does not renew it ends by itself; one from before a reboot, and one that
cannot be read (its writer was killed, its disk is full), counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuflow.errors import GPUFlowError
from gpuflow.fleet.gpu_directory import LockDirectory
from gpuflow.fleet.gpu_locks import GpuLocks

#: Schema number of the file. Unknown fields are passed over: workers of two versions may share a machine.
RESERVATION_SCHEMA: Final = 1
#: No reservation lives longer without being renewed.
LONGEST_TERM_SECONDS: Final = 600.0
_NAME: Final = "reservation.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Reservation(BaseModel):
    """Who waits for which GPUs. Times are seconds of `boot_seconds()`, the same for all processes of the machine.

    `expires`: when it ends if it is not renewed. `deadline`: when the task hopes to start, so what ends before may
    still run on the GPUs; None where nobody can tell.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    task: str
    queue: str
    gpus: tuple[str, ...]
    worker: str
    expires: float
    deadline: float | None = None
    boot: str = ""
    schema_number: int = RESERVATION_SCHEMA


def boot_seconds() -> float:
    """Return the seconds since the machine was started, sleep included; equal in all its processes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return what changes with every start of the machine; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


class Reservations:
    """The one reservation of a machine. Every method raises GPUFlowError when the lock directory fails."""

    def __init__(self, locks: GpuLocks) -> None:
        self._locks = locks

    def current(self) -> Reservation | None:
        """Return the reservation that counts now."""
        with self._locks.locked() as directory:
            if directory is None:
                raise _busy(self._locks)
            return _read(directory)

    def reserve(
        self,
        *,
        task: str,
        queue: str,
        gpus: Sequence[str],
        worker: str,
        term_seconds: float,
        deadline: float | None = None,
    ) -> Reservation:
        """Reserve, or renew what this worker has reserved for this task; return the reservation that counts then.

        It is that of another task, or of another worker, when that one came first.
        """
        wanted = Reservation(
            task=task,
            queue=queue,
            gpus=tuple(gpus),
            worker=worker,
            expires=boot_seconds() + min(term_seconds, LONGEST_TERM_SECONDS),
            deadline=deadline,
            boot=boot_id(),
        )
        with self._locks.locked() as directory:
            if directory is None:
                raise _busy(self._locks)
            there = _read(directory)
            if there is not None and (there.task, there.worker) != (task, worker):
                return there
            directory.write(_NAME, wanted.model_dump_json().encode())
            return wanted

    def drop(self, task: str, worker: str) -> bool:
        """End the reservation of this task by this worker; say whether there was one."""
        with self._locks.locked() as directory:
            if directory is None:
                raise _busy(self._locks)
            there = _read(directory)
            if there is None or (there.task, there.worker) != (task, worker):
                return False
            directory.write(_NAME, b"")
            return True


def _busy(locks: GpuLocks) -> GPUFlowError:
    return GPUFlowError(
        f"the mutex of the machine in {locks.directory.path} could not be had in time: a worker of it hangs"
    )


def _read(directory: LockDirectory) -> Reservation | None:
    content = directory.read(_NAME)
    if not content:
        return None
    try:
        found = Reservation.model_validate_json(content)
    except ValidationError:
        return None
    now = boot_seconds()
    if found.boot != boot_id() or not now < found.expires <= now + LONGEST_TERM_SECONDS:
        return None
    return found
