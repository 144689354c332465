"""What `gpuflow doctor` says about how tasks are kept from a worker that is started on this machine as it is set up."""

from __future__ import annotations

import os

from gpuflow.cli.checks import Check
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

_HOWTO = "see docs/howto/isolate-tasks.md"


def confinement_checks(settings: Settings) -> list[Check]:
    """Check the sandbox and the user of tasks."""
    from gpuflow.worker import bubblewrap
    from gpuflow.worker.child_user import child_user

    try:
        user = child_user(settings)
        if settings.isolate == "bubblewrap":
            bubblewrap.check()
    except GPUFlowError as error:
        return [Check(name="tasks", status="fail", detail=str(error), mend=_HOWTO)]
    sandbox = " in a sandbox" if settings.isolate == "bubblewrap" else ""
    if user is None and os.geteuid() == 0:
        detail = f"run as root{sandbox}: this user is root, and GPUFLOW_CHILD_USER is not set"
        mend = f"set GPUFLOW_CHILD_USER to a user without rights, or start workers as one; {_HOWTO}"
        return [Check(name="tasks", status="warn", detail=detail, mend=mend)]
    whom = f"as {user.name}" if user is not None else "as the worker's user"
    return [Check(name="tasks", status="ok", detail=f"run {whom}{sandbox}")]
