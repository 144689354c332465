"""The base class of every task of the gpuflow app, ours and a team's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from celery import Task


class GPUTask(Task):  # type: ignore[misc]
    """A Celery task that may ask for hardware: `@app.task(resources="A100:1")`."""

    Request: ClassVar[str] = "gpuflow.worker.request:GPURequest"
    #: What the task asks for: a token such as `A100:1`, a list of alternatives, or the long form; None for nothing.
    resources: str | list[str] | Mapping[str, Any] | None = None
