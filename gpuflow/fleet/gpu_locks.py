"""The GPU locks of a machine: who may use which GPU now, among all workers that share the lock directory.

Used by the worker (`worker.machine_gpus`) and by `gpuflow doctor`. It knows locks; not what a task is, nor whether a
GPU works. A GPU is held by an open file: by the worker that took it, and by the shim of the child that it was passed
to, so a killed worker leaves it with the child. Nothing has to be cleaned up after a process that was killed.

    whole GPU    its lock file exclusively
    MIG slice    its own lock file exclusively, that of its parent shared; never beside shares of the parent
    share        the GPU's lock file shared, and a file of its own (`fleet.gpu_shares`); never beside slices of the GPU

All of it under the mutex of the machine, each try without waiting: all or nothing, no deadlock. A worker that is frozen
(SIGSTOP) while it has the mutex keeps the others from taking GPUs until it goes on or is killed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from gpuflow.errors import GPUFlowError
from gpuflow.fleet.gpu_directory import LockDirectory, default_directory, unlock
from gpuflow.fleet.gpu_ends import note_end, read_ends
from gpuflow.fleet.gpu_shares import file_part, live_shares, lock_name, make_share

#: Nothing is allocated when the mutex cannot be had within this time. It is held for about a millisecond.
MUTEX_WAIT_SECONDS: Final = 1.0
_NO_PARENTS: Final[Mapping[str, str]] = {}
#: The descriptors of this process's holds: a fork that does not exec must not keep GPUs.
_open_here: dict[int, None] = {}


def _forget_after_fork() -> None:
    for descriptor in list(_open_here):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open_here.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class Hold:
    """GPUs that are ours until `close()`, and until every process that got `fds` has closed them or ended."""

    def __init__(self, uuids: Sequence[str], fds: Sequence[int] = (), share_mib: int | None = None) -> None:
        self.uuids = tuple(uuids)
        self.fds = tuple(fds)
        self.share_mib = share_mib
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        _open_here.update(dict.fromkeys(self.fds))

    @property
    def closed(self) -> bool:
        """Whether this process has let go."""
        return self._closed

    def close(self) -> None:
        """Let go. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return  # a fork: closed there already, and the numbers may be those of other files by now
        for descriptor in self.fds:
            _open_here.pop(descriptor, None)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How a GPU is held: `whole` and `shareable` say what could be taken, `promised_mib` what live shares have."""

    whole: bool
    shareable: bool
    promised_mib: int = 0


class GpuLocks:
    """The locks in one directory. Safe in threads. Every method raises GPUFlowError when the directory fails."""

    def __init__(self, directory: Path | None = None, *, mutex_wait_seconds: float = MUTEX_WAIT_SECONDS) -> None:
        self.directory = LockDirectory(directory or default_directory())
        self._wait_seconds = mutex_wait_seconds
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._reopening = threading.Lock()
        with self.locked() as opened:
            if opened is not None:
                opened.tidy()

    @contextlib.contextmanager
    def locked(self) -> Iterator[LockDirectory | None]:
        """Hold the mutex for the block and give the directory; None when it could not be had in time."""
        self._stay_in_place()
        directory = self.directory
        with directory.mutex(self._wait_seconds) as had:
            yield directory if had and directory.in_place() else None

    def _stay_in_place(self) -> None:
        """Follow the path to a new directory, unless GPUs are held by files of the old one."""
        with self._reopening:
            if self.directory.in_place():
                return
            if any(not hold.closed for hold in list(self._holds)):
                raise GPUFlowError(
                    f"the lock directory {self.directory.path} was removed or replaced while GPUs are held: no GPU is "
                    "given out until the tasks that run have ended; see GPUFLOW_LOCK_DIR"
                )
            self.directory = LockDirectory(self.directory.path)

    def survey(self, uuids: Iterable[str], *, parents: Mapping[str, str] = _NO_PARENTS) -> dict[str, Occupancy]:
        """Return how each GPU is held; nothing when the mutex could not be had in time.

        `parents` gives the UUID of its parent for each MIG slice.
        """
        with self.locked() as directory:
            if directory is None:
                return {}
            promised = live_shares(directory, directory.names())
            return {uuid: _look(directory, uuid, parents.get(uuid), promised) for uuid in dict.fromkeys(uuids)}

    def free(self, uuids: Iterable[str], *, parents: Mapping[str, str] = _NO_PARENTS) -> tuple[str, ...]:
        """Return those that could be taken whole now, in their order."""
        return tuple(uuid for uuid, how in self.survey(uuids, parents=parents).items() if how.whole)

    def room(self, capacity_mib: Mapping[str, int], *, parents: Mapping[str, str] = _NO_PARENTS) -> dict[str, int]:
        """Return the MiB that could be promised of each GPU now; 0 for one that is held whole.

        `capacity_mib` is what each may promise in all: its memory without that of foreign processes.
        """
        return {
            uuid: max(0, capacity_mib[uuid] - how.promised_mib) if how.shareable else 0
            for uuid, how in self.survey(capacity_mib, parents=parents).items()
        }

    def claim(
        self,
        uuids: Sequence[str],
        *,
        parents: Mapping[str, str] = _NO_PARENTS,
        share_mib: int | None = None,
        capacity_mib: Mapping[str, int] | None = None,
    ) -> Hold | None:
        """Take all of these GPUs, or none: then, and when the mutex could not be had in time, return None.

        With `share_mib`, take so much memory of each instead of the whole; `capacity_mib` is then what each may promise
        in all. No GPU at all is always free.
        """
        if len(set(uuids)) != len(uuids):
            raise GPUFlowError(f"a GPU is named twice: {', '.join(uuids)}")
        if share_mib is not None and (share_mib < 1 or capacity_mib is None):
            raise GPUFlowError(f"a share of {share_mib} MiB cannot be taken: it needs 1 MiB or more, and a capacity")
        if not uuids:
            return Hold((), share_mib=share_mib)
        with self.locked() as directory:
            if directory is None:
                return None
            fds: list[int] = []
            try:
                if not _take_all(directory, uuids, parents, share_mib, capacity_mib or {}, fds):
                    _unlock_all(fds)
                    return None
                fds.append(directory.pin())
                note_end(directory, uuids, None)
            except BaseException:
                _unlock_all(fds)
                raise
            hold = Hold(uuids, fds, share_mib)
            self._holds.add(hold)
            return hold

    def note_end(self, hold: Hold, end: float) -> None:
        """Say when whole GPUs are given back at the latest, in seconds of `gpu_reservation.boot_seconds`."""
        with self.locked() as directory:
            if directory is not None and hold.uuids and hold.share_mib is None and not hold.closed:
                note_end(directory, hold.uuids, end)

    def ends(self) -> dict[str, float]:
        """Return until when GPUs are held at the latest; without those that nobody can tell, or that are shared.

        A GPU that is free may be among them.
        """
        with self.locked() as directory:
            return read_ends(directory) if directory is not None else {}

    def close(self) -> None:
        """Close the directory; holds stay."""
        self.directory.close()


def _unlock_all(fds: list[int]) -> None:
    for descriptor in fds:
        unlock(descriptor)
    fds.clear()


def _take_all(
    directory: LockDirectory,
    uuids: Sequence[str],
    parents: Mapping[str, str],
    share_mib: int | None,
    capacity_mib: Mapping[str, int],
    fds: list[int],
) -> bool:
    """Lock all into `fds`, which holds what was locked also when it ends early."""
    promised = live_shares(directory, directory.names())
    for parent in sorted({parents[uuid] for uuid in uuids if uuid in parents}):
        if file_part(parent) in promised or not _lock(directory, parent, fds, shared=True):
            return False
    for uuid in sorted(uuids):
        already = promised.get(file_part(uuid), 0)
        if share_mib is None:
            if not _lock(directory, uuid, fds):
                return False
            continue
        if already + share_mib > capacity_mib.get(uuid, 0):
            return False
        # Without live shares whoever has the file has the whole GPU, or slices of it.
        if not already and not _could_lock(directory, uuid):
            return False
        if not _lock(directory, uuid, fds, shared=True):
            return False
        fds.append(make_share(directory, uuid, share_mib))
    return True


def _look(directory: LockDirectory, uuid: str, parent: str | None, promised: Mapping[str, int]) -> Occupancy:
    mib = promised.get(file_part(uuid), 0)
    if parent is not None and (file_part(parent) in promised or not _could_lock(directory, parent, shared=True)):
        return Occupancy(whole=False, shareable=False, promised_mib=mib)
    alone = _could_lock(directory, uuid)
    return Occupancy(whole=alone and not mib, shareable=alone or mib > 0, promised_mib=mib)


def _lock(directory: LockDirectory, uuid: str, fds: list[int], *, shared: bool = False) -> bool:
    descriptor = directory.lock(lock_name(uuid), shared=shared)
    if descriptor is not None:
        fds.append(descriptor)
    return descriptor is not None


def _could_lock(directory: LockDirectory, uuid: str, *, shared: bool = False) -> bool:
    descriptor = directory.lock(lock_name(uuid), shared=shared)
    if descriptor is None:
        return False
    unlock(descriptor)
    return True
