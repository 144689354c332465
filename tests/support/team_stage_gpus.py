"""Functions with GPUs that stages call, and that the process has too which submits (`--include team_stage_gpus`)."""

from __future__ import annotations

import os
from typing import Any

from gpuflow import app, context


@app.task(resources="A100:1")
def on_gpu() -> list[str]:
    """Say which GPUs it has."""
    return list(context.gpus)


@app.task(resources="A100:1", keep_warm="10m")
def warm_on_gpu(number: int) -> dict[str, Any]:
    """Say which process answers, and which GPUs it has."""
    return {"pid": os.getpid(), "gpus": list(context.gpus), "number": number}


@app.task(bind=True, resources="A100:1")
def again_on_gpu(self: Any) -> int:
    """Ask for a retry once; say how many GPUs the second try has."""
    if not self.request.retries:
        raise self.retry(countdown=0)
    return len(context.gpus)


@app.task(bind=True, keep_warm="10m")
def again_warm(self: Any, pids: list[int]) -> list[int]:
    """Ask for a retry once; say which process has answered each try."""
    if not self.request.retries:
        raise self.retry(args=[[os.getpid()]], countdown=0)
    return [*pids, os.getpid()]
