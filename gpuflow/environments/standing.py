"""Which environments can be used now, by which Python. What a worker asks, at its start and before each child.

It looks at markers and at modules that are installed, and loads and starts nothing: cheap enough to be asked often.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gpuflow.environments.building import why_not
from gpuflow.environments.checking import Finding, check, this_python
from gpuflow.environments.definition import (
    DEFAULT,
    VARIANTS,
    Definition,
    UnknownEnvironment,
    Variant,
    is_name,
    load,
    names,
)
from gpuflow.environments.packages import packages_path
from gpuflow.environments.places import Marker, Place, interpreter
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

#: ready: to be used; broken: built, and does not work; outdated: built with other pins; installed: the worker's own
#: packages; building: on the way; absent.
Status = Literal["ready", "broken", "outdated", "installed", "building", "absent"]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An environment that works: its Python, what to set for a child, and the task types that it serves."""

    name: str
    variant: Variant | None
    python: Path
    task_types: frozenset[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    python_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one variant of an environment stands; `variant` is None for what is installed beside gpuflow."""

    definition: Definition
    variant: Variant | None
    status: Status
    detail: str = ""
    marker: Marker | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.definition.name

    @property
    def mend(self) -> str:
        """The command that builds it, or builds it again."""
        again = " --force" if self.status == "broken" else ""
        variant = f" --variant {self.variant}" if self.variant else ""
        return f"gpuflow env create {self.name}{variant}{again}"


def standings(settings: Settings, name: str) -> list[Standing]:
    """Return how every variant of an environment stands, and for `default` what is installed. Raises GPUFlowError."""
    definition = load(settings, name)
    found = [_standing(settings, definition, variant) for variant in VARIANTS if variant in definition.variants]
    if name != DEFAULT:
        return found
    served = installed_task_types(definition)
    missing = sorted(set(definition.task_types) - served)
    detail = f"not installed here: what {', '.join(missing)} need" if missing else ""
    return [Standing(definition=definition, variant=None, status="installed", detail=detail), *found]


def _standing(settings: Settings, definition: Definition, variant: Variant) -> Standing:
    place = Place(settings, definition.name, variant)
    marker = place.marker()
    if marker is None:
        status: Status = "building" if place.is_building else "absent"
        return Standing(definition=definition, variant=variant, status=status)
    folder = place.folder(marker)
    why = why_not(definition, place, marker)
    if why is None:
        return Standing(definition=definition, variant=variant, status="ready", marker=marker, folder=folder)
    status = "outdated" if marker.digest != definition.digest(variant) else "broken"
    return Standing(definition=definition, variant=variant, status=status, detail=why, marker=marker, folder=folder)


def installed_task_types(definition: Definition) -> frozenset[str]:
    """Return the task types whose modules are installed beside gpuflow; none is loaded."""
    return frozenset(
        task_type
        for task_type, modules in definition.task_types.items()
        if all(find_spec(module) is not None for module in modules)
    )


def find(settings: Settings, name: str, *, gpus: bool = False) -> Ready | None:
    """Return the environment that a child uses, with or without GPUs; None where none of that kind works.

    `default` that was not built is the Python of this process. Raises UnknownEnvironment.
    """
    definition = load(settings, name)
    variant: Variant = "cuda" if gpus else "cpu"
    if variant in definition.variants:
        found = _standing(settings, definition, variant)
        if found.status == "ready" and found.folder is not None:
            return Ready(
                name=name,
                variant=variant,
                python=interpreter(found.folder),
                task_types=frozenset(definition.task_types),
                variables=definition.recipe(variant).env,
                python_path=str(packages_path(settings)),
            )
    if name != DEFAULT:
        return None
    return Ready(name=name, variant=None, python=this_python(), task_types=installed_task_types(definition))


def working(settings: Settings, *, gpus: bool = False) -> dict[str, Path]:
    """Return the Python of every environment that works, by name; one whose definition is wrong does not count."""
    found = {}
    for name in names(settings):
        try:
            ready = find(settings, name, gpus=gpus)
        except GPUFlowError:
            continue
        if ready is not None:
            found[name] = ready.python
    return found


def python_of(settings: Settings, name: str, *, gpus: bool = False) -> Path:
    """Return the Python of an environment. Raises GPUFlowError with the command that builds it."""
    ready = find(settings, name, gpus=gpus)
    if ready is not None:
        return ready.python
    variant = "cuda" if gpus else "cpu"
    if variant not in load(settings, name).variants:
        raise GPUFlowError(f"environment {name!r} has no variant {variant!r}; use another executor for this task")
    found = next(one for one in standings(settings, name) if one.variant == variant)
    state = "is not built" if found.status in ("absent", "building") else f"cannot be used: {found.detail}"
    raise GPUFlowError(f"environment {name} ({variant}) {state}; run `{found.mend}` on this machine")


def examine(settings: Settings, standing: Standing) -> Finding | None:
    """Run the check of an environment, and remember in its marker what it found; None where nothing is built."""
    if standing.variant is None or standing.marker is None or standing.folder is None:
        return None
    definition = standing.definition
    if standing.status == "outdated":
        return Finding(problem=standing.detail, python_version="", versions={}, seconds=0.0)
    found = check(settings, interpreter(standing.folder), definition.recipe(standing.variant), definition.check)
    place = Place(settings, standing.name, standing.variant)
    if found.problem != standing.marker.problem:
        with contextlib.suppress(OSError):  # it may be another user's
            place.note_check(standing.marker.folder, found.problem, time.time())
    return found


def removable(settings: Settings, name: str) -> tuple[Variant, ...]:
    """Return the variants of an environment that are defined or on this disk; a wrong definition counts for nothing.

    Raises UnknownEnvironment for a name that has neither a definition nor anything here.
    """
    here = tuple(one for one in VARIANTS if is_name(name) and Place(settings, name, one).is_here)
    try:
        defined = load(settings, name).variants
    except UnknownEnvironment:
        if not here:
            raise
        return here
    except GPUFlowError:
        return here
    return tuple(one for one in VARIANTS if one in defined or one in here)


def note_problem(settings: Settings, ready: Ready, problem: str) -> None:
    """Remember that a built environment has let a child down: it counts as broken until a check says otherwise."""
    if ready.variant is None:
        return
    folder = ready.python.parent.parent
    with contextlib.suppress(OSError):  # it may be another user's
        Place(settings, ready.name, ready.variant).note_check(folder.name, problem, time.time())
