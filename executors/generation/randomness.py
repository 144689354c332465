"""The generators of random numbers: a seeded answer has numbers of its own, and leaves those of others as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def apart() -> Iterator[None]:
    """Within, random numbers are drawn that nobody outside misses: the generators are put back after the block."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def begin(state: Any, seed: int) -> None:
    """Go on where `state`, which `reached` gave, ended; at the seed where it is None."""
    if state is None:
        torch.manual_seed(seed)
        return
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


def reached() -> Any:
    """Return the state of the generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
