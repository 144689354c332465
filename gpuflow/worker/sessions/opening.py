"""What a session is begun with, made of the first task that needs it. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from gpuflow.policy.code import kinds_of
from gpuflow.protocol import Request
from gpuflow.secrets import Redactor
from gpuflow.settings import Settings
from gpuflow.worker.child_python import ChildPython
from gpuflow.worker.confinement import UNCONFINED, Confinement, of_session
from gpuflow.worker.containers.local import removal_of
from gpuflow.worker.preparation import PreparedAttempt
from gpuflow.worker.sessions.view import View

#: Variables of one task, which a session does not have.
_OF_TASK: Final = frozenset(
    {
        "TASK_ID",
        "ATTEMPT",
        "OUTPUT_DIR",
        "CHECKPOINT_DIR",
        "RESUME_FROM",
        "NOTICE_SECONDS",
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE",
        "GPUFLOW_CPUS",
    }
)
#: Sections of a spec that say what is loaded.
_LOADED: Final = ("taskType", "model", "env", "embedding", "secrets")
#: Fields of a prepared container section that are of one task: its request, and what its container would be called.
_OF_CONTAINER_REQUEST: Final = frozenset({"request", "metrics", "run", "lock", "exchange", "no_engine"})
#: Fields of a call that its process has from the first one.
_OF_PROCESS: Final = frozenset({"environ", "path"})
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_TITLE_CHARACTERS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a session is begun. `title` is for people; `variables` a digest of what it is loaded with: values too.

    `at_end` is a command that is run when nothing of its processes is left, however they ended; `confinement` is what
    it may not do.
    """

    title: str
    argv: Sequence[str]
    line: str
    environment: Mapping[str, str]
    redactor: Redactor
    variables: str
    at_end: Sequence[str] = ()
    confinement: Confinement = UNCONFINED
    of_function: bool = False
    #: Makes what it sees at the place of all results; None: it is not sandboxed.
    view: Callable[[], View] | None = None


def serves_one_owner(settings: Settings, spec: Mapping[str, Any]) -> bool:
    """Say whether the session of a task answers tasks of its owner alone.

    So it is where the operator keeps tasks from each other, and where the task has brought code of its own, which would
    see what the others ask; the command of a preset is the operator's. A session that runs the engine alone reads what
    each of its tasks may.
    """
    section = spec.get("container")
    in_container = isinstance(section, Mapping) and bool(section.get("brings"))
    return settings.isolate != "none" or bool(kinds_of(spec)) or in_container


def opening_of(
    python: ChildPython, prepared: PreparedAttempt, *, owner: str | None = None, worker_id: str = ""
) -> Opening:
    """Return how the session of a task would be begun by it; `owner` is the only one whom it serves, None for all."""
    request, settings = prepared.request, prepared.settings
    confined = partial(of_session, settings, request, prepared.environment, python.use.python)
    sandboxed = settings.isolate == "bubblewrap" and request.task_type != "container"
    shared = {name: value for name, value in prepared.environment.items() if name not in _OF_TASK}
    gpus = ",".join(request.gpus)
    return Opening(
        title=_title(request),
        argv=(*python.argv, "session"),
        line=_line(python, request),
        environment={**shared, "CUDA_VISIBLE_DEVICES": gpus, "GPU_DEVICE": gpus},
        redactor=prepared.redactor,
        variables=hashlib.sha256(
            json.dumps([shared, _weights(request), _container(request), owner], sort_keys=True, default=str).encode()
        ).hexdigest(),
        at_end=removal_of(request),
        confinement=confined(),
        view=partial(View, settings, worker_id, request, lambda seen: confined(seen=seen)) if sandboxed else None,
    )


def function_opening(python: ChildPython, prepared: PreparedAttempt, *, owner: str | None) -> Opening:
    """Return how the session of a team's function would be begun by one of its calls."""
    opening = opening_of(python, prepared, owner=owner)
    function = prepared.request.spec["function"]
    name = str(function["warm"]["name"])
    line = {"op": "open", "name": name, "keep_seconds": function["warm"]["keep_seconds"], "call": function}
    return replace(
        opening,
        title=_safe(name),
        line=json.dumps(line),
        variables=hashlib.sha256(f"{opening.variables}{json.dumps(function['environ'])}".encode()).hexdigest(),
        of_function=True,
    )


def warm_call(request: Request) -> Request:
    """Return the request of a call to a session of its function, which has path and variables already."""
    function = {name: value for name, value in request.spec["function"].items() if name not in _OF_PROCESS}
    return replace(request, spec={**request.spec, "function": function})


def _weights(request: Request) -> str:
    """Return where the weights of a checkpoint are: brought here anew, they are another folder of the same name."""
    return request.checkpoint_path or ""


def _container(request: Request) -> dict[str, Any]:
    """Return what a container is started with, by its preset as that is now; nothing for other task types."""
    section = request.spec.get("container") or {}
    return {name: value for name, value in section.items() if name not in _OF_CONTAINER_REQUEST}


def _title(request: Request) -> str:
    source = (request.spec.get("model") or {}).get("source") or {}
    name = (request.spec.get("container") or {}).get("preset") or source.get("identifier") or "model"
    return _safe(str(name))


def _safe(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-.")[-_TITLE_CHARACTERS:] or "model"


def _line(python: ChildPython, request: Request) -> str:
    """Return the line that opens it. Adapters come with each request; here it is said whether there will be any."""
    spec: dict[str, Any] = {name: request.spec[name] for name in _LOADED if name in request.spec}
    if "container" in request.spec:
        spec["container"] = {**request.spec["container"], "request": None}
    if "model" in spec:
        spec["model"] = {name: value for name, value in spec["model"].items() if name != "adapters"}
        spec["adapted"] = bool(request.spec["model"].get("adapters"))
    return json.dumps(
        {
            "op": "open",
            "engine": python.engine or request.task_type,
            "spec": spec,
            "task_type": request.task_type,
            "gpus": list(request.gpus),
            "share_mib": request.share_mib,
            "cache_dir": request.cache_dir,
            "checkpoint_path": request.checkpoint_path,
        },
        default=list,
    )
