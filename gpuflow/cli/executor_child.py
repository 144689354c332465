"""The child processes of `gpuflow executor`: which executors there are, and in which Python one runs.

The executors are imported by a child alone; nothing of theirs is loaded into the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from gpuflow.cluster.commands import with_our_packages
from gpuflow.environments import DEFAULT, find, python_of
from gpuflow.errors import GPUFlowError
from gpuflow.protocol import Request, parse_line
from gpuflow.settings import Settings
from gpuflow.worker.standalone import environment_for


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the child of a request is started."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def described(settings: Settings, *task_types: str) -> list[dict[str, Any]]:
    """Return the executors of this environment, all or those of `task_types`, imported by a child.

    Raises GPUFlowError when that cannot be done.
    """
    environment = {**with_our_packages(os.environ), "GPUFLOW_EXECUTORS": ",".join(settings.executors)}
    argv = [sys.executable, "-P", "-m", "executors.registry", *task_types]
    done = subprocess.run(argv, env=environment, capture_output=True, check=False)
    for line in done.stdout.splitlines():
        event = parse_line(line)
        if event.name == "result":
            return list(event.data["value"]["executors"])
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise GPUFlowError(f"the executors cannot be listed: {said[-1] if said else f'exit code {done.returncode}'}")


def start_of(request: Request, settings: Settings) -> Start:
    """Return how to start a request's child: in the environment that its spec names, else that of its executor.

    Raises GPUFlowError with the command that builds an environment which is not there.
    """
    environment = environment_for(request, settings)
    name = request.spec.get("environment")
    if not name:
        found = described(settings, request.task_type)
        name = found[0]["environment"] if found else None
    python = sys.executable
    if name and name != DEFAULT:
        ready = find(settings, name, gpus=bool(request.gpus))
        if ready is None:
            python_of(settings, name, gpus=bool(request.gpus))  # says what is missing
            raise GPUFlowError(f"environment {name} is not ready; run `gpuflow env check {name}`")
        python = str(ready.python)
        environment = {**ready.variables, **environment}
        if ready.python_path:
            environment["PYTHONPATH"] = ready.python_path
    return Start(argv=(python, "-P", "-m", "executors"), environment=environment)
