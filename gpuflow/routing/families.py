"""Which Celery task runs which task type. Read by the app when it sends, and by tasks/ when it registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuflow.protocol import is_user_type
from gpuflow.spec.function_section import arguments_of, is_function
from gpuflow.spec.units import duration_seconds

#: Served by every worker in slots of its own, whatever its -Q, load or drain state.
CONTROL_QUEUE: Final = "gpuflow.control"

#: Calls of the URLs of `notify`: served by every worker as the control queue is, in slots of their own, since a
#: receiver may be slow.
NOTICE_QUEUE: Final = "gpuflow.notices"
#: Those with fields that a worker of the version before does not read: it does not take from here.
CALL_BACK_QUEUE: Final = "gpuflow.callbacks"
NOTICE_QUEUES: Final = (NOTICE_QUEUE, CALL_BACK_QUEUE)
#: What the names of Celery's own tasks begin with (`celery.map`, ...): they call others where they stand.
CELERYS: Final = "celery."
#: Option of the call of a function by a template, for `GPUFlow.send_task`: the canonical spec of the task.
SPEC_OPTION: Final = "gpuflow_spec"
#: Entries of `notify` that a task may have.
MAX_NOTICES: Final = 10

#: Task type of a template -> name of the Celery task of its family.
TASK_OF_TYPE: Final[dict[str, str]] = {
    "echo": "gpuflow.echo",
    "inference": "gpuflow.inference",
    "embedding": "gpuflow.inference",
    "rag": "gpuflow.inference",
    "sft": "gpuflow.training",
    "lora_sft": "gpuflow.training",
    "dpo": "gpuflow.training",
    "ppo": "gpuflow.training",
    "grpo": "gpuflow.training",
    "reward": "gpuflow.training",
    "command": "gpuflow.command",
    "container": "gpuflow.container",
}

#: The Celery task of all task types of users' own executors.
USER_TASK: Final = "gpuflow.executor"

#: Celery tasks that run an executor under supervision and have a task record.
SUPERVISED_TASKS: Final = frozenset({*TASK_OF_TYPE.values(), USER_TASK})


def task_of(task_type: str) -> str:
    """Return the name of the Celery task that runs a task type. Raises KeyError for what is no task type."""
    return USER_TASK if is_user_type(task_type) else TASK_OF_TYPE[task_type]


def call_of(spec: Mapping[str, Any]) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Return the Celery call that runs the task of a canonical spec: its name, args, kwargs and options."""
    if not is_function(spec):
        return task_of(spec["taskType"]), [], {"spec": dict(spec)}, {}
    args, kwargs = arguments_of(spec)
    options: dict[str, Any] = {SPEC_OPTION: dict(spec)}
    if spec.get("timeout"):
        options["time_limit"] = duration_seconds(spec["timeout"])
    if spec.get("priority") is not None:
        options["priority"] = spec["priority"]
    return spec["function"]["name"], args, kwargs, options
