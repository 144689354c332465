"""What a session is begun with, made of the first task that needs it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.protocol import Request
from gpuflow.worker.preparation import Prepared
from gpuflow.worker.sessions.pool import Opening
from gpuflow.worker.starting import Start

#: Engines that can be kept warm.
WARM_ENGINES: Final = frozenset({"vllm", "transformers"})
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
    }
)


def opening_of(name: str, start: Start, prepared: Prepared) -> Opening:
    """Return how the session of a name is begun, by the first task that asks for it."""
    request = prepared.request
    variables = {name: value for name, value in prepared.environment.items() if name not in _OF_TASK}
    gpus = ",".join(request.gpus)
    return Opening(
        name=name,
        argv=(*start.argv, "session"),
        line=_line(start, request),
        environment={**variables, "CUDA_VISIBLE_DEVICES": gpus, "GPU_DEVICE": gpus},
        redactor=prepared.redactor,
        variables=digest(prepared),
    )


def digest(prepared: Prepared) -> str:
    """Return a digest of the variables that a session of this task would have, secrets included, GPUs apart."""
    variables = {name: value for name, value in prepared.environment.items() if name not in _OF_TASK}
    return hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).hexdigest()


def _line(start: Start, request: Request) -> str:
    spec: Mapping[str, Any] = request.spec
    loaded = {name: spec[name] for name in ("taskType", "model", "env", "embedding") if name in spec}
    return json.dumps(
        {
            "op": "open",
            "engine": start.engine,
            "spec": loaded,
            "task_type": request.task_type,
            "gpus": list(request.gpus),
            "cache_dir": request.cache_dir,
            "checkpoint_path": request.checkpoint_path,
        },
        default=list,
    )
