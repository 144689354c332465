"""What the end of a child means: whether it succeeded, and the error record if not. Pure.

Used by the attempt of a task, and by `standalone`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, Literal

from gpuflow.worker.cgroups import GroupEnd
from gpuflow.worker.child import ChildEnd

#: `preempted`: the child gets a notice first, to save what it has; `shutdown`: it is stopped as it is.
StopReason = Literal["cancelled", "timeout", "soft_timeout", "lost", "superseded", "preempted", "shutdown", "gpu_lost"]


def succeeded(finish: Mapping[str, Any], end: ChildEnd) -> bool:
    """Say whether a child completed: it said so, and its exit code agrees."""
    return finish.get("status") == "completed" and end.exit_code == 0


def cannot_start(error: OSError) -> dict[str, Any]:
    """Return the error of a child that could not be started."""
    return _error("CannotStart", f"the child cannot start: {error}", True)


def _error(kind: str, message: str, retryable: bool) -> dict[str, Any]:
    return {"type": kind, "message": message, "retryable": retryable}


def stopped(reason: StopReason, seconds: float, limit: float | None) -> dict[str, Any]:
    """Return the error of a child that was told to stop after `seconds`; `limit` is its time limit."""
    if reason == "timeout":
        limit_text = f"{limit:g} s" if limit is not None else "the time limit"
        return _error("TimeLimitExceeded", f"stopped after {seconds:.1f} s: the limit is {limit_text}", False)
    if reason == "soft_timeout":
        return _error("SoftTimeLimitExceeded", f"stopped after {seconds:.1f} s by the soft time limit", False)
    if reason == "cancelled":
        return _error("Cancelled", "cancelled by a user", False)
    if reason == "gpu_lost":
        return _error("GpuLost", "a GPU of the task fell off the bus (the driver says so)", True)
    return _error("WorkerLost", f"the attempt was given up: {reason}", True)


def failed(finish: Mapping[str, Any], end: ChildEnd) -> dict[str, Any]:
    """Return the error of a child that ended by itself and has not succeeded."""
    if end.group is not None and end.group.killed:
        return _out_of_memory(end.group)
    status = finish.get("status")
    given = finish.get("error")
    if status == "completed" and end.exit_code is not None:
        return _error("Contradiction", f"the child said completed, but ended with {ending(end)}", False)
    if isinstance(given, Mapping) and status != "completed":
        error = _error(
            str(given.get("type", "Failed")),
            str(given.get("message", "")),
            bool(given.get("retryable", False)),
        )
        return {**error, "beside": end.beside} if end.beside else error
    if status in ("failed", "cancelled"):
        return _error("Failed", f"the child said {status} and gave no error", False)
    if end.signal is not None:
        return _error("ChildKilled", f"the child ended with {ending(end)}{_hint(end.signal)}; see its log", True)
    if end.exit_code is None:
        return _error("ChildLost", "the process that watched the child is gone", True)
    if end.exit_code == os.EX_TEMPFAIL:
        return _error("ChildDied", "the child ended with exit code 75 (try again later); see its log", True)
    if end.exit_code != 0:
        return _error("ChildDied", f"the child ended with {ending(end)}; see its log", False)
    return _error("NoFinish", "the child ended without a finish event; see its log", False)


def _out_of_memory(group: GroupEnd) -> dict[str, Any]:
    """Return the error of a child that the kernel ended for memory. Its own limit would be hit again."""
    if group.hit_limit and group.memory_mib is not None:
        return _error(
            "OutOfMemory",
            f"the kernel ended the task: it used more than the {group.memory_mib} MiB of memory that it asks for; "
            "raise resources.hardware.memory",
            False,
        )
    return _error(
        "OutOfMemory",
        "the kernel ended the task: the machine, or the worker's service, was out of memory; declare what tasks "
        "need (resources.hardware.memory), so that fewer run at once",
        True,
    )


def _hint(number: int) -> str:
    if number == signal.SIGKILL:
        return " (was the machine out of memory? `dmesg` says so)"
    return " (a full disk or a failing device?)" if number == signal.SIGBUS else ""


def ending(end: ChildEnd) -> str:
    """Return how a child ended, in words."""
    if end.signal is None and end.exit_code is None:
        return "nobody knows how"
    if end.signal is not None:
        return f"signal {signal.Signals(end.signal).name}"
    return f"exit code {end.exit_code}"
