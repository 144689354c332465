"""The GPUs of this machine as one worker sees them: what could be taken now, what it takes, what it gives back.

Used by admission and the supervisor. It joins the GPU locks, which all workers of the machine share
(`fleet.gpu_locks`), with what the driver tells (`fleet.gpu_usage`). It knows nothing of tasks and queues. Without GPUs
it does nothing and touches no directory. A lock directory or a driver that fails gives out no GPU; the cause is logged
once and is in `problem`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from gpuflow.errors import GPUFlowError
from gpuflow.fleet.gpu_locks import GpuLocks, Hold, Occupancy
from gpuflow.fleet.gpu_reservation import Reservation, Reservations, boot_id, boot_seconds
from gpuflow.fleet.gpu_usage import GpuUsage, UsageReader, alive, wait_clean
from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.placement import FOREIGN_TOLERATED_MIB, FreeGpus

log = get_logger("gpuflow.gpus")
_T = TypeVar("_T")

#: What was seen counts for so long.
FRESH_SECONDS: Final = 0.25
#: The driver answers within this time, or no GPU is given out. It is asked on the thread that takes messages.
DRIVER_WAIT_SECONDS: Final = 2.0
#: So long a GPU that is given back may need until nothing is left on it.
CLEAN_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The machine at one moment."""

    at: float
    change: object = None
    held: Mapping[str, Occupancy] = field(default_factory=dict)
    usage: Mapping[str, GpuUsage] = field(default_factory=dict)


class MachineGpus:
    """The GPUs that this worker may use. Safe in threads.

    `gpus` are those of the worker's capability, `lock_dir` the setting. Raises GPUFlowError when there are GPUs and the
    lock directory cannot be used.
    """

    def __init__(
        self,
        gpus: Sequence[GpuCapability],
        lock_dir: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        reader: UsageReader | None = None,
    ) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._parents = {gpu.uuid: gpu.mig_parent_uuid for gpu in gpus if gpu.mig_parent_uuid is not None}
        self._locks = GpuLocks(lock_dir) if gpus else None
        self._reservations = Reservations(self._locks) if self._locks is not None else None
        self._reader = reader or UsageReader()
        self._clock = clock
        self._looking = threading.Lock()
        self._seen: _Seen | None = None
        self._change = object()
        self._before: dict[Hold, Mapping[str, GpuUsage]] = {}
        self._foreign: dict[str, int] = {}  # of each GPU when it was free last
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str | None:
        """What keeps GPUs from being given out, for people; None when all is well."""
        return "; ".join(sorted(self._problems.values())) or None

    # -- what could be taken ---------------------------------------------------------------------------------------

    def snapshot(self, capability: Capability) -> FreeGpus:
        """Return what could be given out of the GPUs now; nothing of one that is lost. Never raises."""
        if self._locks is None:
            return FreeGpus()
        seen = self._look()
        return FreeGpus(
            whole=frozenset(gpu.uuid for gpu in capability.gpus if _is_free(seen, gpu.uuid)),
            room_mib=_room(seen, capability),
            foreign_mib=_held_back(seen),
        )

    def held_back(self) -> dict[str, int]:
        """Return the GPUs that are held back because of processes outside gpuflow, and the MiB that these use.

        Never raises.
        """
        return _held_back(self._look()) if self._locks is not None else {}

    def shared(self) -> bool:
        """Whether tasks share some GPU now. Never raises."""
        return self._locks is not None and any(held.promised_mib for held in self._look().held.values())

    def usage(self) -> dict[str, GpuUsage]:
        """Return what the driver tells of the GPUs, for the registry and `explain`. Never raises."""
        return dict(self._look().usage) if self._locks is not None else {}

    def lost(self) -> dict[str, str] | None:
        """Return the GPUs that are taken out, with the cause; a task on one is to be stopped. Never raises.

        None while nothing is known: the driver does not answer, or the lock directory fails.
        """
        if self._locks is None:
            return {}
        usage = self._look().usage
        return {uuid: found.lost for uuid, found in usage.items() if found.lost is not None} if usage else None

    def looked_at(self) -> float:
        """Return when the machine was seen as the next answers say it is, on the clock of all its processes."""
        return self._look().at if self._locks is not None else 0.0

    @property
    def change(self) -> object:
        """Another object whenever this worker has taken GPUs, or given some back."""
        return self._change

    def last_seen(self) -> tuple[Hashable, ...]:
        """Return how the GPUs were held, and which were held back, at the last look of anybody; looks at nothing."""
        seen = self._seen or _Seen(at=0.0)
        held, foreign = seen.held, sorted(_held_back(seen))
        return (*sorted((uuid, how.whole, how.shareable, how.promised_mib) for uuid, how in held.items()), *foreign)

    # -- taking and giving back ------------------------------------------------------------------------------------

    def claim(self, uuids: Sequence[str], share_mib: int | None = None) -> Hold | None:
        """Take these GPUs, or so many MiB of each; None when one of them cannot be had now. Never raises."""
        if self._locks is None:
            return Hold((), share_mib=share_mib) if not uuids else None
        seen = self._look()
        if any(uuid not in seen.usage or seen.usage[uuid].lost is not None for uuid in uuids):
            return None
        try:
            hold = self._locks.claim(
                uuids,
                parents=self._parents,
                share_mib=share_mib,
                capacity_mib={uuid: _capacity(seen, uuid) for uuid in uuids},
            )
        except GPUFlowError as error:
            self._say("taking", str(error))
            return None
        finally:
            self._changed()
        self._say("taking", None)
        if hold is not None:
            with self._looking:
                self._before[hold] = {uuid: seen.usage[uuid] for uuid in uuids}
        return hold

    def note_end(self, hold: Hold, seconds: float) -> None:
        """Say to all workers of the machine that these GPUs are given back within so many seconds. Never raises."""
        if self._locks is not None:
            with contextlib.suppress(GPUFlowError):
                self._locks.note_end(hold, boot_seconds() + seconds)

    def ends(self) -> dict[str, float]:
        """Return until when GPUs are held at the latest (`boot_seconds`), where that is known. Never raises."""
        with contextlib.suppress(GPUFlowError):
            return self._locks.ends() if self._locks is not None else {}
        return {}

    def release(self, hold: Hold, *, wait_seconds: float = CLEAN_WAIT_SECONDS) -> bool:
        """Give GPUs back when nothing of their task is left on them, or the wait is over; say whether they are clean.

        To be called when the shim of the task has gone. What is left after the wait counts as foreign memory from then
        on. A second call does nothing.
        """
        if hold.closed:
            return True
        left: dict[str, str] = {}
        with self._looking:
            before = self._before.pop(hold, {})
        try:
            if hold.uuids:
                left = self._wait_clean(hold, before, wait_seconds)
                for uuid, clause in left.items():
                    log.warning("gpu_not_clean", gpu=uuid, cause=clause)
        finally:
            hold.close()
            self._changed()
        return not left

    def _wait_clean(self, hold: Hold, before: Mapping[str, GpuUsage], wait_seconds: float) -> dict[str, str]:
        earlier = {pid for usage in before.values() for pid in usage.pids}
        whole = hold.share_mib is None
        # Alone on its GPUs, all that is new is of the task or an intruder; beside others, what died but is still there.
        return wait_clean(
            hold.uuids,
            lambda pid: pid not in earlier and (whole or not alive(pid)),
            time.monotonic() + wait_seconds,
            most_mib={uuid: usage.used_mib + FOREIGN_TOLERATED_MIB for uuid, usage in before.items()}
            if whole
            else None,
            reader=self._reader,
        )

    # -- the reservation of the machine ----------------------------------------------------------------------------

    def reservation(self) -> Reservation | None:
        """Return the reservation that counts now. Never raises; None also when the lock directory fails."""
        return self._try(lambda there: there.current())

    def reserve(
        self,
        *,
        task: str,
        queue: str,
        gpus: Sequence[str],
        worker: str,
        term_seconds: float,
        deadline: float | None = None,
    ) -> Reservation | None:
        """Reserve or renew; return the reservation that counts then, perhaps another.

        None when the lock directory fails.
        """
        return self._try(
            lambda there: there.reserve(
                task=task, queue=queue, gpus=gpus, worker=worker, term_seconds=term_seconds, deadline=deadline
            )
        )

    def drop(self, task: str, worker: str) -> bool:
        """End the reservation of this task by this worker; say whether there was one."""
        return bool(self._try(lambda there: there.drop(task, worker)))

    def _try(self, call: Callable[[Reservations], _T]) -> _T | None:
        if self._reservations is None:
            return None
        try:
            answer = call(self._reservations)
        except GPUFlowError as error:
            self._say("reserving", str(error))
            return None
        self._say("reserving", None)
        return answer

    def identity(self) -> dict[str, str] | None:
        """Return machine and lock directory for the registry, which `gpuflow doctor` compares. None without GPUs."""
        if self._locks is None:
            return None
        directory = self._locks.directory
        return {"machine": boot_id(), "directory": directory.identity(), "path": str(directory.path)}

    def group(self) -> str:
        """Return a name that all workers share that use the lock directory of this one; "" without GPUs."""
        there = self.identity()
        return f"@machine:{there['machine']}:{there['directory']}" if there is not None else ""

    # -- looking ---------------------------------------------------------------------------------------------------

    def _look(self) -> _Seen:
        """Return the machine as it is now, or was FRESH_SECONDS ago at most."""
        with self._looking:
            seen = self._seen
            if seen is not None and seen.change is self._change and self._clock() - seen.at < FRESH_SECONDS:
                return seen
            self._seen = seen = self._read()
            return seen

    def _read(self) -> _Seen:
        change, at = self._change, self._clock()
        if self._locks is None:
            return _Seen(at=at, change=change)
        try:
            held = self._locks.survey(self._gpus, parents=self._parents)
        except GPUFlowError as error:
            self._say("looking", str(error))
            return _Seen(at=at, change=change)
        # Locks first: what another worker gives back is off the GPU before its lock is.
        promised = {uuid: how.promised_mib if how.shareable else None for uuid, how in held.items()}
        found = self._reader.read(promised, DRIVER_WAIT_SECONDS, earlier_mib=dict(self._foreign))
        if found is None:
            self._say("looking", "the NVIDIA driver does not answer: no GPU is given out until it does")
            return _Seen(at=at, change=change)
        self._foreign.update({uuid: usage.foreign_mib for uuid, usage in found.items() if promised[uuid] == 0})
        lost = "; ".join(f"{uuid}: {usage.lost}" for uuid, usage in found.items() if usage.lost is not None)
        self._say("looking", f"taken out: {lost}" if lost else None)
        return _Seen(at=at, change=change, held=held, usage=found)

    def _changed(self) -> None:
        self._change = object()

    def _say(self, doing: str, problem: str | None) -> None:
        """Log a problem when it is a new one, and when it is over."""
        before = self._problems.pop(doing, None)
        if problem is not None:
            self._problems[doing] = problem
            if problem != before:
                log.warning("gpus_not_usable", doing=doing, cause=problem)
        elif before is not None:
            log.info("gpus_usable_again", doing=doing)


def _capacity(seen: _Seen, uuid: str) -> int:
    """Return what a GPU may promise in all: its memory without the foreign one."""
    usage = seen.usage.get(uuid)
    if usage is None or usage.lost is not None:
        return 0
    return max(0, usage.total_mib - usage.foreign_mib)


def _is_free(seen: _Seen, uuid: str) -> bool:
    """Whether nobody holds a GPU, and it is not lost."""
    held, usage = seen.held.get(uuid), seen.usage.get(uuid)
    return held is not None and usage is not None and held.whole and usage.lost is None


def _room(seen: _Seen, capability: Capability) -> dict[str, int]:
    return {
        gpu.uuid: max(0, _capacity(seen, gpu.uuid) - held.promised_mib) if held.shareable else 0
        for gpu in capability.gpus
        if (held := seen.held.get(gpu.uuid)) is not None
    }


def _held_back(seen: _Seen) -> dict[str, int]:
    found = {uuid: usage.foreign_mib for uuid, usage in seen.usage.items()}
    return {uuid: foreign_mib for uuid, foreign_mib in found.items() if foreign_mib > FOREIGN_TOLERATED_MIB}
