"""Which class runs which task type. The class is imported when it is asked for, so a light task stays light."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from executors.base import Executor, ExecutorError

#: Task type -> "module:Class".
EXECUTORS: Final[Mapping[str, str]] = {
    "echo": "executors.echo:Echo",
    "inference": "executors.inference:Inference",
    "sft": "executors.sft:SupervisedTuning",
    "lora_sft": "executors.sft:SupervisedTuning",
}


def find(task_type: str) -> Executor:
    """Return an executor for a task type.

    Raises ExecutorError: UnknownTaskType, or MissingDependency when its libraries are not installed here.
    """
    place = EXECUTORS.get(task_type)
    if place is None:
        raise ExecutorError(
            "UnknownTaskType", f"no executor runs task type {task_type!r}; there are: {', '.join(EXECUTORS)}"
        )
    module, _, name = place.partition(":")
    executor: Executor = getattr(import_module(module), name)()
    return executor
