"""The base classes of every task of the gpuflow app, ours and a team's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from celery import Task
from celery.utils.imports import symbol_by_name

from gpuflow.broker.merged_calls import RECORDED_HEADER


class RoutedTask(Task):  # type: ignore[misc]
    """A Celery task that is routed by what it asks for, and run as it stands."""

    Request: ClassVar[str] = "gpuflow.worker.celery_request:GPURequest"
    #: What the task asks for: a token such as `A100:1`, a list of alternatives, or the long form; None for nothing.
    resources: str | list[str] | Mapping[str, Any] | None = None
    #: Whether equal calls are merged: True, or a function of the arguments that returns what is equal in equal calls
    #: (None: this call is not merged).
    merge: bool | Callable[..., str | None] | None = None
    #: For how many seconds a result answers further equal calls.
    merge_result_ttl: float = 0


class GPUTask(RoutedTask):
    """A Celery task that may ask for hardware: `@app.task(resources="A100:1")`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; one that was merged with equal calls by its record (`worker.merged_tasks`)."""
        if self.request.get(RECORDED_HEADER):
            return symbol_by_name("gpuflow.worker.merged_tasks:run")(self, args, kwargs)
        return super().__call__(*args, **kwargs)
