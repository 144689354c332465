"""How an attempt ends: whether its child succeeded, the error record of every other end, and what Celery is told.

The error texts about how an attempt ended, and what went wrong around its child, are made here. Used by the attempt of
a task, by warm sessions, by `standalone`, and by the supervisor, which commits an `Outcome`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpuflow.artifacts.checkpoint_store import CheckpointUnreachable
from gpuflow.artifacts.destination import FetchFailed, UploadFailed
from gpuflow.errors import GPUFlowError, TaskCancelled, TaskDead, TaskFailed
from gpuflow.functions.calls import TOLD
from gpuflow.ledger.states import TaskState
from gpuflow.secrets import known
from gpuflow.worker.cgroups import GroupEnd
from gpuflow.worker.child import ChildEnd
from gpuflow.worker.child_python import EnvironmentNotReady

#: `preempted`: the child gets a notice first, to save what it has; `shutdown`: it is stopped as it is.
StopReason = Literal["cancelled", "timeout", "soft_timeout", "lost", "superseded", "preempted", "shutdown", "gpu_lost"]
#: How a supervised task ends when it does not succeed; Celery logs these in one line, without a traceback.
ENDS: Final = (TaskFailed, TaskCancelled)
#: What another attempt, here or on another worker, may not meet.
_PASSING: Final = (OSError, UploadFailed, FetchFailed, CheckpointUnreachable, EnvironmentNotReady)


class HandedBack(GPUFlowError):
    """The attempt cannot be made here now, through no fault of its task; the message says why.

    It goes back to its queue. That counts as no failure, as if the worker had given notice.
    """

    def record(self) -> dict[str, Any]:
        """Return the error of the attempt for its history."""
        return {"type": "HandedBack", "message": str(self), "retryable": True}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended: the result value of a completed one, or the error record of any other.

    `began` says whether its child had told a single event, or was ended by a signal before it could.
    """

    completed: bool
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    stop: StopReason | None = None
    artifacts: tuple[str, ...] = ()
    log_tail: str = ""
    began: bool = True


def handed_back(error: HandedBack) -> Outcome:
    """Return the end of an attempt that did not begin, through no fault of its task."""
    return Outcome(completed=False, stop="preempted", error=error.record())


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
        error |= {TOLD: True} if given.get(TOLD) is True else {}
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


def exception_of(state: TaskState, error: dict[str, Any]) -> Exception:
    """Return the exception of an end without result."""
    message = str(error.get("message") or f"the task is {state}")
    if state is TaskState.CANCELLED:
        return TaskCancelled(message)
    if state is TaskState.DEAD:
        return TaskDead(message, error)
    return TaskFailed(message, error)


def cause_of(error: Exception) -> dict[str, Any]:
    """Return the error record of what went wrong around the child; trouble with the disk may pass."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return {
        "type": "DiskFull" if full else type(error).__name__,
        "message": known.text(str(error)),
        "retryable": isinstance(error, _PASSING),
    }
