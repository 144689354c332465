"""The error tree of gpuflow.

Anyone may import this file; it imports nothing of ours. The docstring of an error is its default message.
An error names the thing, the cause and the mend in one line; `str(error)` is what the command line prints.
"""

from __future__ import annotations

import os
from typing import Any


class GPUFlowError(Exception):
    """gpuflow could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").split("\n", 1)[0])


class InvalidSettings(GPUFlowError):
    """A setting has a value that gpuflow cannot use."""


class InvalidTemplate(GPUFlowError):
    """The template is not valid.

    `mistakes` holds every mistake found in it, each with `path`, `line` and `message`; `warnings` what else was found.
    """

    def __init__(
        self, message: str | None = None, mistakes: tuple[Any, ...] = (), warnings: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(message)
        self.mistakes, self.warnings = mistakes, warnings


class NoCapableWorker(GPUFlowError):
    """No worker of the fleet can run this task."""


class TaskFailed(GPUFlowError):
    """The task failed.

    `details` holds the error record: `type`, `message`, `retryable` and, for a pipeline, `cause`.
    """

    def __init__(self, message: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class TaskCancelled(GPUFlowError):
    """The task was cancelled."""


class TaskDead(TaskFailed):
    """The task used up its attempts and lies in the dead letters; see `gpuflow dead show`."""


class UnknownTask(GPUFlowError):
    """No task or pipeline of this fleet has that id."""


class UnreadableMessage(GPUFlowError):
    """The message of a task cannot be read or run."""


class ResultGone(GPUFlowError):
    """A result that is needed is not in Redis any more."""


class BrokerUnavailable(GPUFlowError):
    """The broker cannot be reached, or takes nothing for now."""


class ArtifactError(GPUFlowError):
    """An artifact could not be stored, fetched or verified."""


class AuthError(GPUFlowError):
    """The token is missing, unknown or has not the right for this."""


class NotAllowed(GPUFlowError):
    """The policy of the worker does not allow this.

    `setting` is the variable of the worker that would allow it. A task that is refused so fails and is not tried again.
    """

    def __init__(self, message: str | None = None, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


def unreachable_text(cause: object) -> str:
    """Return what is said of a broker that does not answer. The mend depends on whether REDIS_URL says where it is."""
    mend = "check that its server runs, and that REDIS_URL is right"
    if not os.environ.get("REDIS_URL"):
        mend = "set REDIS_URL, or start one with `gpuflow up`"
    return f"the broker cannot be reached ({cause}); {mend}"
