"""How the child of `gpuflow executor run` is started: in the environment that a worker of this machine would choose."""

from __future__ import annotations

from dataclasses import dataclass

from gpuflow.environments import snapshot
from gpuflow.protocol import Request, is_user_type
from gpuflow.settings import Settings
from gpuflow.worker.child_python import python_of
from gpuflow.worker.standalone import environment_for
from gpuflow.worker.user_environments import environments_of


@dataclass(frozen=True, kw_only=True)
class ChildStart:
    """How the child of a request is started."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def child_start(request: Request, settings: Settings) -> ChildStart:
    """Return how to start a request's child. Raises EnvironmentNotReady with the command that mends it."""
    own = (request.task_type,) if is_user_type(request.task_type) and not request.spec.get("environment") else ()
    named = environments_of(settings, own).get(request.task_type)
    stands = snapshot(settings, gpus=bool(request.gpus))
    python = python_of({"taskType": request.task_type, **request.spec}, stands, named=named)
    return ChildStart(argv=python.argv, environment=python.variables(environment_for(request, settings)))
