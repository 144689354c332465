"""How all environments stand on this machine, as `gpuflow.environments.choice` asks. It reads markers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuflow.environments.choice import State
from gpuflow.environments.definition import DEFAULT, Definition, Variant, is_own, load, names
from gpuflow.environments.standing import Ready, find, standings
from gpuflow.errors import GPUFlowError
from gpuflow.routing.offers import Lack
from gpuflow.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How the environments stood a moment ago, and those that can be used, by name."""

    states: tuple[State, ...]
    usable: Mapping[str, Ready]


def snapshot(settings: Settings, *, gpus: bool) -> Snapshot:
    """Return how every environment stands for children with, or without, GPUs; a wrong definition is left out.

    It takes some milliseconds: for a worker's heartbeat, not for each child.
    """
    states = []
    usable = {}
    for name in names(settings):
        try:
            definition = load(settings, name)
            ready = find(settings, name, gpus=gpus)
            states.append(_state(settings, definition, ready, "cuda" if gpus else "cpu"))
        except (GPUFlowError, OSError):
            continue
        if ready is not None:
            usable[name] = ready
    return Snapshot(states=tuple(states), usable=usable)


def _state(settings: Settings, definition: Definition, ready: Ready | None, variant: Variant) -> State:
    serves = frozenset(definition.task_types)
    can = serves & ready.task_types if ready is not None else frozenset()
    whole = ready is not None and can == serves
    return State(
        name=definition.name,
        engine=definition.engine,
        serves=serves,
        ready=can,
        works=ready is not None,
        own=is_own(definition.name),
        lack=Lack(why="lacks nothing") if whole else _lack(settings, definition, variant),
    )


def _lack(settings: Settings, definition: Definition, variant: Variant) -> Lack:
    """Return what keeps a variant from being used, as if it were not; a clause after the environment's name."""
    if variant not in definition.variants:
        return Lack(why=f"has no variant {variant}")
    found = next(one for one in standings(settings, definition.name) if one.variant == variant)
    if found.detail:
        return Lack(why=f"({variant}) cannot be used: {found.detail}", mend=f"`{found.mend}`")
    if definition.name == DEFAULT:
        return Lack(why="is not built, and what is installed beside gpuflow lacks its packages", mend=f"`{found.mend}`")
    return Lack(why=f"({variant}) is not built", mend=f"`{found.mend}`")
