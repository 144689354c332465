"""What `gpuflow.context` finds in a task that runs in a thread of the worker: Celery's current task of that thread."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from celery import _state

from gpuflow.functions.calls import FUNCTION_HEADER
from gpuflow.logs import get_logger
from gpuflow.worker.results_folder import ResultsFolder
from gpuflow.worker.runtime import Runtime, find

log = get_logger("gpuflow.context")

#: Where the surroundings of a delivery are kept: at its request.
_KEPT: Final = "gpuflow_surroundings"


def of_this_thread() -> InThread | None:
    """Return where the task of this thread runs; None for a thread without one, and in the hooks of a child's task."""
    runtime = find()
    for task in reversed(_state._task_stack.stack):
        request = task.request
        if runtime is None or request.called_directly or request.is_eager:
            continue
        if request.get(FUNCTION_HEADER) or not request.id:
            return None
        found: InThread = vars(request).setdefault(_KEPT, InThread(runtime, task))
        return found
    return None


class InThread:
    """One delivery of a task that runs in a thread. Its folders are made when they are asked for."""

    def __init__(self, runtime: Runtime, task: Any) -> None:
        self._runtime, self._task, self._request = runtime, task, task.request
        self.task_id: str | None = str(self._request.id)
        self.results_dir: Path | None = runtime.app.settings.results_dir

    @cached_property
    def _folder(self) -> ResultsFolder:
        return ResultsFolder(self._runtime.app.settings.results_dir, str(self._request.id))

    @cached_property
    def attempt(self) -> int:
        """One above its retries, and above the folders that earlier deliveries have left."""
        return max(self._folder.next_attempt(), 1 + int(self._request.retries or 0))

    @property
    def gpus(self) -> list[str]:
        """The GPUs of its claim; it sees all of the worker's."""
        tag = (self._request.properties or {}).get("delivery_tag")
        return [gpu.uuid for gpu in self._runtime.hardware.gpus if tag in self._runtime.admission.tags_on(gpu.uuid)]

    @cached_property
    def output_dir(self) -> Path:
        """The folder of this attempt, below the results of the task. Raises OSError."""
        folder = self._folder.attempt_dir(self.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of its checkpoints."""
        return self._folder.checkpoint_dir(self.attempt)

    @cached_property
    def resume_from(self) -> Path | None:
        """The newest complete checkpoint of an earlier delivery."""
        return self._folder.resume_from(self.attempt)

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Set Celery's state to PROGRESS: there is no record."""
        if not self._request.ignore_result:
            self._task.update_state(state="PROGRESS", meta={**progress, "attempt": self.attempt})

    def log(self, line: str) -> None:
        """Write a line to the worker's log."""
        log.info("task_said", task=self.task_id, name=self._task.name, message=line)

    def declare(self, name: str) -> None:
        """Log it: no manifest is made of a task without a record."""
        log.info("task_artifact", task=self.task_id, path=name)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Log it."""
        log.info("task_checkpoint", task=self.task_id, step=step)

    def should_stop(self) -> bool:
        """Say whether the worker hands back what runs, or stops at once."""
        return self._runtime.stopping is not None or self._runtime.leases.is_stopping
