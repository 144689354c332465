"""The whole weights of a model that is spread over the ranks (FSDP), to save them as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole_state(trainer: Any) -> Mapping[str, Any] | None:
    """Return the weights of a trainer's model on rank 0 if each rank has only a part of them, else None.

    Every rank calls it: it gathers. The ranks but the first get weights that they must not use.
    """
    if not getattr(trainer, "is_fsdp_enabled", False):
        return None
    state: Mapping[str, Any] = trainer.accelerator.get_state_dict(trainer.model)
    return state
