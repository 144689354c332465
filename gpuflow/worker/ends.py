"""How a supervised task ends: the exception that Celery is given, and the error record of an exception of ours."""

from __future__ import annotations

import errno
from typing import Any, Final

from gpuflow.artifacts.checkpoint_store import CheckpointUnreachable
from gpuflow.artifacts.destination import FetchFailed, UploadFailed
from gpuflow.errors import TaskCancelled, TaskDead, TaskFailed
from gpuflow.ledger.states import TaskState
from gpuflow.secrets import known
from gpuflow.worker.child_python import EnvironmentNotReady

#: How a supervised task ends when it does not succeed; Celery logs these in one line, without a traceback.
ENDS: Final = (TaskFailed, TaskCancelled)
#: What another attempt, here or on another worker, may not meet.
_PASSING: Final = (OSError, UploadFailed, FetchFailed, CheckpointUnreachable, EnvironmentNotReady)


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
