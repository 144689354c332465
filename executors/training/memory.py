"""A training that runs out of memory: the smaller batch of its one more try, and the error where none is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executors.base import ExecutorError
from executors.failures import classify


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows a device takes at once, and of how many such batches one step is made; `before` is what it was at first."""

    size: int
    accumulation: int
    eval_size: int
    #: An evaluation takes a multiple of so many rows at once: the answers to one prompt.
    eval_group: int = 1
    before: Batch | None = None

    @classmethod
    def of(cls, arguments: Any) -> Batch:
        """Return the batch of a trainer's arguments (TrainingArguments)."""
        return cls(
            size=arguments.per_device_train_batch_size,
            accumulation=arguments.gradient_accumulation_steps,
            eval_size=arguments.per_device_eval_batch_size,
            eval_group=getattr(arguments, "num_generations_eval", None) or getattr(arguments, "num_generations", 1),
        )

    def halved(self) -> Batch | None:
        """Return half the batch, or its largest part below, and more of them a step of the same rows; None for one row.

        None also in a training of several processes, which cannot begin again one by one.
        """
        if self.size < 2 or int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return None
        half = next(size for size in range(self.size // 2, 0, -1) if self.size % size == 0)
        eval_half = max(1, self.eval_size // 2)
        return Batch(
            size=half,
            accumulation=self.size // half * self.accumulation,
            eval_size=self.eval_size if eval_half % self.eval_group else eval_half,
            eval_group=self.eval_group,
            before=self,
        )

    def arguments(self) -> dict[str, int]:
        """Return the fields of the trainer's arguments."""
        return {
            "per_device_train_batch_size": self.size,
            "gradient_accumulation_steps": self.accumulation,
            "per_device_eval_batch_size": self.eval_size,
        }

    def applied_to(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section `training` with this batch; as many answers are generated at once as before."""
        changed = {**training, **self.arguments()}
        if self.before and training.get("steps_per_generation"):
            changed["steps_per_generation"] = -(-training["steps_per_generation"] * self.before.size // self.size)
        return changed

    def reason(self) -> str:
        """Say what is tried again, and how."""
        first = self.before or self
        return (
            f"out of memory with a batch of {first.size}; trying again with {self.size} and "
            f"{self.accumulation} instead of {first.accumulation} batches a step"
        )

    def record(self) -> dict[str, Any]:
        """Return what the result says of a second try."""
        before = self.before.arguments() if self.before else None
        return {"message": self.reason(), "before": before, **self.arguments()}


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that the memory of the device, or of the machine, does not suffice."""
    return bool(classify(error)["type"] == "OutOfMemory")


def free_memory() -> None:
    """Give back what a failed try has left: tensors in circles of references, and the cache of the GPU."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_room(error: BaseException, batch: Batch) -> ExecutorError:
    """Return the error of a training for which no smaller batch is left to try."""
    tried = f", after {batch.before.size}" if batch.before else ""
    return ExecutorError(
        "OutOfMemory",
        f"out of memory with a batch of {batch.size}{tried}: {str(error).strip()[:800] or type(error).__name__}; use a "
        "smaller training.per_device_train_batch_size or max_length, the section lora, or a GPU with more memory",
        retryable=True,
    )
