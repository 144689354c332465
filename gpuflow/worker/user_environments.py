"""What a child says of the executors of this machine: which there are, and the environment that each names.

They are imported by that child alone; nothing of theirs is loaded here. Called at a worker's start for the executors
of users, and by `gpuflow executor`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from gpuflow.environments import DEFAULT
from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.protocol import parse_line
from gpuflow.settings import Settings
from gpuflow.worker.child_environment import child_environment, python_path

log = get_logger("gpuflow.worker")

#: An import of executors that takes longer than so many seconds is given up.
_LONGEST_SECONDS: Final = 120.0


def described(settings: Settings, *task_types: str) -> list[dict[str, Any]]:
    """Return the executors of this environment, all or those of `task_types`, imported by a child.

    Raises GPUFlowError when that cannot be done.
    """
    path = [part for part in (python_path(), os.environ.get("PYTHONPATH")) if part]
    given = {"PYTHONPATH": os.pathsep.join(path), "GPUFLOW_EXECUTORS": ",".join(settings.executors)}
    environment = child_environment(os.environ, pass_env=settings.pass_env, given=given, offline=settings.offline)
    argv = [sys.executable, "-P", "-m", "executors.registry", *task_types]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, check=False, timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise GPUFlowError(f"the executors cannot be listed: their import takes over {_LONGEST_SECONDS:g} s") from None
    for line in done.stdout.splitlines():
        event = parse_line(line)
        if event.name == "result":
            return list(event.data["value"]["executors"])
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise GPUFlowError(f"the executors cannot be listed: {said[-1] if said else f'exit code {done.returncode}'}")


def environments_of(settings: Settings, task_types: Sequence[str]) -> dict[str, str | None]:
    """Return the environment that the executor of each of these task types of users names; None where it names
    none or cannot be imported here: then the environment that serves its task type, or the default one.
    """
    if not task_types:
        return {}
    found: dict[str, str | None] = dict.fromkeys(task_types)
    try:
        for row in described(settings, *task_types):
            found[row["task_type"]] = None if row["environment"] == DEFAULT else row["environment"]
            if row["problem"]:
                log.warning("executor_not_usable", task_type=row["task_type"], problem=row["problem"])
    except GPUFlowError as error:
        log.warning("executors_not_described", cause=str(error))
    return found
