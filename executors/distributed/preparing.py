"""Has accelerate prepare a model for several ranks where it would pass over that, and say nothing.

* `fsdp` counts for it on GPUs alone; on CPUs it trains by DDP instead. `torch` itself can do both.
* An evaluation cannot prepare a model that is to be sharded; it would need the optimizer.
* An evaluation prepares the model without its wrapper for several ranks (DDP), and marks it as prepared. A training
  that follows takes it as it is: no gradient is exchanged, each rank follows its own rows, and the loss that is shown
  still is a mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_PREPARED: Final = "_is_accelerate_prepared"


def shard_where_asked(arguments: Any) -> None:
    """Let `fsdp` count on CPUs too. Call it before the trainer is made, with its arguments (TrainingArguments)."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if arguments.fsdp and PartialState().distributed_type == DistributedType.MULTI_CPU:
        # accelerate goes on to FSDP from the types of several GPUs alone; the device stays what it is.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def before_training(trainer: Any) -> Iterator[None]:
    """Within, a trainer may evaluate the model that it is to train: `train` then prepares it for all ranks.

    A model that is to be sharded is evaluated whole, on each rank. With one process there is nothing to do.
    """
    sharded = getattr(trainer, "is_fsdp_enabled", False)
    trainer.is_fsdp_enabled = False
    try:
        yield
    finally:
        trainer.is_fsdp_enabled = sharded
    if trainer.accelerator.num_processes == 1:
        return
    model = trainer.model
    original = model.__dict__.pop("_original_forward", None)
    if original is not None:
        model.forward = original
    if hasattr(model, _PREPARED):
        delattr(model, _PREPARED)
    trainer.accelerator._models.clear()
    trainer.model_wrapped = model
