"""Who uses the memory of the GPUs, seen through NVML: what foreign processes have, and which GPUs are to be left alone.

Used by the worker (`worker.machine_gpus`). Ours is what runs below a shim of gpuflow, of any worker of the machine; all
else is foreign: a notebook, a desktop, what a child that escaped left behind. The driver may hang when a GPU falls off
the bus, so it is asked by a thread that nobody has to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.fleet.driver_calls import DriverCalls
from gpuflow.fleet.hardware_nvml import GpuProcess, GpuUse, Uses, read_uses

_NOTHING: Final[Mapping[str, int]] = {}
_PAUSE_SECONDS: Final = 0.05
_PROC: Final = Path("/proc")
#: Inode of the machine's first namespace of process ids: the driver tells ids of that one (PROC_PID_INIT_INO of Linux).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """What matters to who gives out a GPU: memory in MiB, the processes on it, and why it is to be left alone."""

    uuid: str
    total_mib: int = 0
    used_mib: int = 0
    foreign_mib: int = 0
    pids: frozenset[int] = frozenset()
    lost: str | None = None


def usage(
    promised_mib: Mapping[str, int | None],
    *,
    earlier_mib: Mapping[str, int] = _NOTHING,
    read: Callable[[Sequence[str]], Uses] = read_uses,
    is_ours: Callable[[int], bool | None] | None = None,
) -> dict[str, GpuUsage]:
    """Return the usage of each GPU of `promised_mib`: what live shares have of it, 0 for one that is free.

    None is for one that is held whole: nobody asks then what of its memory is foreign, and 0 is told. `earlier_mib` is
    the foreign memory of each GPU when it was free last. A GPU that cannot be read, or has had uncorrectable memory
    errors since its last reset, is `lost`. Never raises.
    """
    found = read(list(promised_mib))
    answer: dict[str, GpuUsage] = {}
    for uuid, promised in promised_mib.items():
        use = found.uses.get(uuid)
        if use is None:
            answer[uuid] = GpuUsage(uuid=uuid, lost=found.failed.get(uuid, "the driver does not tell"))
            continue
        answer[uuid] = GpuUsage(
            uuid=uuid,
            total_mib=use.total_mib,
            used_mib=use.used_mib,
            foreign_mib=0
            if promised is None
            else foreign_mib(use, promised, is_ours or of_a_shim, earlier_mib.get(uuid, 0)),
            pids=frozenset(process.pid for process in use.processes or ()),
            lost=_broken(use),
        )
    return answer


def foreign_mib(use: GpuUse, promised_mib: int, is_ours: Callable[[int], bool | None], earlier_mib: int = 0) -> int:
    """Return the MiB that foreign processes have of a GPU.

    Of a GPU that is free all that is used is foreign, whoever it is. Beside live shares: what the foreign processes
    have and, where one cannot be told from ours or its memory is not known, what is used beyond the promises, but no
    less than was foreign before there were any (`earlier_mib`): promises that nobody uses yet would hide it.
    """
    processes = use.processes or ()
    if not promised_mib:
        return max(use.used_mib, _sum(processes))
    kinds = {process: is_ours(process.pid) for process in processes}
    unknown = [process for process, ours in kinds.items() if ours is None or process.used_mib is None]
    ours_mib = _sum([process for process, ours in kinds.items() if ours])
    beyond = use.used_mib - max(promised_mib, ours_mib)
    if unknown or use.processes is None:
        return max(0, beyond, min(earlier_mib, use.used_mib))
    return max(0, beyond, _sum([process for process, ours in kinds.items() if not ours]))


def _sum(processes: Sequence[GpuProcess]) -> int:
    return sum(process.used_mib or 0 for process in processes)


def _broken(use: GpuUse) -> str | None:
    if not use.uncorrected_errors:
        return None
    return (
        f"{use.uncorrected_errors} uncorrectable memory errors since its last reset; "
        "reset it (`nvidia-smi --gpu-reset`) or replace it"
    )


def of_a_shim(pid: int) -> bool | None:
    """Whether a process runs below a shim of gpuflow; None when it cannot be seen from here.

    Inside a container the ids that the driver tells are those of another namespace.
    """
    try:
        if (_PROC / "self/ns/pid").stat().st_ino != _FIRST_NAMESPACE:
            return None
    except OSError:
        return None
    return below_a_shim(pid)


def below_a_shim(pid: int) -> bool | None:
    """Whether a process of this namespace runs below a shim; None when there is none of this id."""
    first = True
    while pid > 0:
        try:
            words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            parent = int((_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None if first else False
        if any(word.endswith(b"gpuflow/worker/shim.py") for word in words):
            return True
        pid, first = parent, False
    return False


def alive(pid: int) -> bool:
    """Whether a process of this id is there, as far as one can see from here."""
    try:
        state = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(state) and state[0] not in (b"Z", b"X")


class UsageReader:
    """Asks the driver in a thread of its own. Safe in threads."""

    def __init__(self, read: Callable[[Sequence[str]], Uses] = read_uses) -> None:
        self._read = read
        self._driver = DriverCalls()

    def read(
        self, promised_mib: Mapping[str, int | None], wait_seconds: float, *, earlier_mib: Mapping[str, int] = _NOTHING
    ) -> dict[str, GpuUsage] | None:
        """Return the usage, or None when the driver has not answered in time. It is not asked again until it has."""
        if not promised_mib:
            return {}
        return self._driver.ask(lambda: usage(promised_mib, earlier_mib=earlier_mib, read=self._read), wait_seconds)


def wait_clean(
    uuids: Sequence[str],
    pids: Collection[int] | Callable[[int], bool],
    deadline: float,
    *,
    most_mib: Mapping[str, int] | None = None,
    reader: UsageReader | None = None,
) -> dict[str, str]:
    """Wait until the driver shows none of `pids` on these GPUs, and no more memory in use than `most_mib` of each.

    `deadline` is on `time.monotonic()`. Returns what is left then, a clause for each GPU that is not clean. A GPU that
    is lost has nobody on it.
    """
    reader = reader or UsageReader()
    chosen = pids if callable(pids) else pids.__contains__
    while True:
        left: dict[str, str] = {}
        found = reader.read(dict.fromkeys(uuids), max(0.1, deadline - time.monotonic()))
        if found is None:
            return dict.fromkeys(uuids, "the driver does not answer")
        for uuid, now in found.items():
            there = sorted(pid for pid in now.pids if chosen(pid))
            most = (most_mib or {}).get(uuid)
            if there:
                left[uuid] = f"process {', '.join(map(str, there))} is still on it"
            elif most is not None and now.used_mib > most and now.lost is None:
                left[uuid] = f"{now.used_mib} MiB are still in use"
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
