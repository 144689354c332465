"""gpuflow: the Celery way to run a mixed GPU fleet.

Public names are loaded when they are first used, so that `import gpuflow` is fast and child processes can import
`gpuflow.protocol` and `gpuflow.spec` without Celery. `celery -A gpuflow` finds the attribute `app`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuflow.importing import load

__version__ = "0.1.0"

_HOME = {
    "app": "gpuflow.celery_app",
    "context": "gpuflow.context",
    "GPUFlow": "gpuflow.celery_app",
    "batch": "gpuflow.functions.batching",
    "BatchedCall": "gpuflow.functions.batching",
    "submit": "gpuflow.client",
    "submit_pipeline": "gpuflow.client",
    "get": "gpuflow.client",
    "explain": "gpuflow.explaining",
    "load_reference": "gpuflow.client",
    "local_fleet": "gpuflow.local",
    "Task": "gpuflow.client",
    "PipelineRun": "gpuflow.client",
    "Template": "gpuflow.spec",
    **dict.fromkeys(
        (
            "ArtifactError",
            "AuthError",
            "BrokerUnavailable",
            "GPUFlowError",
            "InvalidSettings",
            "InvalidTemplate",
            "NoCapableWorker",
            "TaskCancelled",
            "TaskDead",
            "TaskFailed",
            "UnknownTask",
        ),
        "gpuflow.errors",
    ),
}

# Written out, for type checkers: those of users that are strict take only what stands here as public.
__all__ = [
    "ArtifactError",
    "AuthError",
    "BatchedCall",
    "BrokerUnavailable",
    "GPUFlow",
    "GPUFlowError",
    "InvalidSettings",
    "InvalidTemplate",
    "NoCapableWorker",
    "PipelineRun",
    "Task",
    "TaskCancelled",
    "TaskDead",
    "TaskFailed",
    "Template",
    "UnknownTask",
    "__version__",
    "app",
    "batch",
    "context",
    "explain",
    "get",
    "load_reference",
    "local_fleet",
    "submit",
    "submit_pipeline",
]

if TYPE_CHECKING:
    from gpuflow import context
    from gpuflow.celery_app import GPUFlow, app
    from gpuflow.client import PipelineRun, Task, get, load_reference, submit, submit_pipeline
    from gpuflow.errors import (
        ArtifactError,
        AuthError,
        BrokerUnavailable,
        GPUFlowError,
        InvalidSettings,
        InvalidTemplate,
        NoCapableWorker,
        TaskCancelled,
        TaskDead,
        TaskFailed,
        UnknownTask,
    )
    from gpuflow.explaining import explain
    from gpuflow.functions.batching import BatchedCall, batch
    from gpuflow.local import local_fleet
    from gpuflow.spec import Template


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gpuflow' has no attribute {name!r}")
    value = load(home) if home == f"gpuflow.{name}" else getattr(load(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
