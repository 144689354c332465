"""What the functions of functions.py do, ours and the peer's: a model that takes a moment for each call."""

from __future__ import annotations

import time

#: How long the model works on a call, and on a batch of any size (seconds): the interpreter is free meanwhile, as it is
#: while a GPU works.
CALL_SECONDS = 0.01
BATCH_SECONDS = 0.05


def make_model() -> dict[int, int]:
    """Make the model: a table that takes some memory."""
    return {number: number * number for number in range(100_000)}


def embed(model: dict[int, int], number: int, seconds: float) -> int:
    """Ask the model."""
    time.sleep(seconds)
    return model[number]
