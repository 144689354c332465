"""Which Celery task runs which task type. Read by the app when it sends, and by tasks/ when it registers."""

from __future__ import annotations

from typing import Final

#: Served by every worker in slots of its own, whatever its -Q, load or drain state.
CONTROL_QUEUE: Final = "gpuflow.control"

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

#: Celery tasks that run an executor under supervision and have a task record.
SUPERVISED_TASKS: Final = frozenset(TASK_OF_TYPE.values())
