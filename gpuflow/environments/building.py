"""Builds an environment, so that a half-built one never counts, two builders build once, and a failure leaves nothing.

Called by `gpuflow env create`. The steps: lock, remove leftovers, make the virtual environment in a folder that no
marker names, pip, check, write the marker. Until the marker is there the former environment serves on.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

from gpuflow.environments.checking import check, clean_environment
from gpuflow.environments.definition import Definition, Recipe, Variant
from gpuflow.environments.installing import Pip, Progress, Tell, make_venv
from gpuflow.environments.places import Marker, Place, interpreter, size_of
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

#: Free disk that a build asks for, as a multiple of what the environment takes: wheels lie beside it while pip runs.
_ROOM: Final = 1.4
_GIGABYTE: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class Built:
    """An environment that is there now; `new` says whether this call built it."""

    marker: Marker
    folder: Path
    new: bool


def create(
    settings: Settings,
    definition: Definition,
    variant: Variant,
    *,
    wheelhouse: Path | None = None,
    force: bool = False,
    tell: Tell = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Built:
    """Build a variant of an environment, or return the one that is there.

    `force` builds although there is one that works. `wheelhouse` is a folder of wheels, used instead of the network.
    Raises GPUFlowError with cause and mend, OSError.
    """
    recipe = definition.recipe(variant)
    place = Place(settings, definition.name, variant)
    asked_at = time.time()
    if place.is_building:
        say(f"another process builds {definition.name} ({variant}); waiting for it")
    with place.locked() as lock:
        there = place.marker()
        # One that was built while we waited is new enough for anybody.
        wanted = not force or (there is not None and there.built_at >= asked_at)
        if there is not None and wanted and why_not(definition, place, there) is None:
            return Built(marker=there, folder=place.folder(there), new=False)
        _check_possible(settings, definition, recipe, wheelhouse)
        place.sweep()
        _check_room(place, definition, recipe)
        marker = _build(settings, definition, place, lock=lock, wheelhouse=wheelhouse, tell=tell)
        place.sweep()  # the one that it replaces
        return Built(marker=marker, folder=place.folder(marker), new=True)


def why_not(definition: Definition, place: Place, marker: Marker) -> str | None:
    """Say why a built environment must not be used; None when it may. Looks at the marker and for its Python alone."""
    if marker.variant not in definition.variants or marker.digest != definition.digest(marker.variant):
        return "its pins are not those of this version of gpuflow"
    if not interpreter(place.folder(marker)).exists():
        return f"its Python {interpreter(place.folder(marker))} has gone"
    return marker.problem or None


def _build(
    settings: Settings, definition: Definition, place: Place, *, lock: int, wheelhouse: Path | None, tell: Tell
) -> Marker:
    recipe = definition.recipe(place.variant)
    started = time.monotonic()
    digest = definition.digest(place.variant)
    folder = place.new_folder(digest)
    try:
        place.log_file.unlink(missing_ok=True)
        tell(Progress(phase="virtual environment"))
        environment = clean_environment()
        make_venv(folder, lock=lock, environment=environment)
        pip = Pip(folder, log=place.log_file, lock=lock, wheelhouse=wheelhouse, environment=environment)
        beside: list[str] = []
        for step in recipe.steps:
            pip.install(step, beside, tell)
            beside.extend(step)
        if recipe.uninstall:
            pip.uninstall(recipe.uninstall)
        shutil.rmtree(folder / ".tmp", ignore_errors=True)
        tell(Progress(phase="check"))
        found = check(settings, interpreter(folder), recipe, definition.check)
        if not found.ok:
            raise GPUFlowError(
                f"environment {place.name} ({place.variant}) was built but does not work: {found.problem}; "
                f"mend that, then create it again (pip's log: {place.log_file})"
            )
        marker = Marker(
            name=place.name,
            variant=place.variant,
            digest=digest,
            folder=folder.name,
            python_version=found.python_version,
            built_at=time.time(),
            build_seconds=round(time.monotonic() - started, 1),
            size_bytes=size_of(folder),
            checked_at=time.time(),
        )
        place.commit(marker)
    except BaseException:
        tell(Progress(phase="removing what was built"))
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return marker


def _check_possible(settings: Settings, definition: Definition, recipe: Recipe, wheelhouse: Path | None) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(definition.python).contains(version, prereleases=True):
        raise GPUFlowError(
            f"environment {definition.name} needs Python {definition.python}, this is {version}; "
            "run gpuflow by such a Python (a virtual environment of its own) to create it"
        )
    if wheelhouse is not None and not any(wheelhouse.glob("*.whl")):
        raise GPUFlowError(
            f"{wheelhouse} holds no wheels; fill it where there is a network: "
            f"gpuflow env requirements {definition.name} > pins.txt, pip download -r pins.txt -d {wheelhouse.name}"
        )
    if wheelhouse is None and settings.offline:
        raise GPUFlowError(
            f"GPUFLOW_OFFLINE is set, and environment {definition.name} ({', '.join(recipe.pins[:2])}, ...) "
            "would be fetched from the network; give its wheels with --wheelhouse DIR, or unset it"
        )


def _check_room(place: Place, definition: Definition, recipe: Recipe) -> None:
    free = shutil.disk_usage(place.home).free
    needed = recipe.size_gb * _ROOM * _GIGABYTE
    if free < needed:
        raise GPUFlowError(
            f"environment {definition.name} ({place.variant}) needs about {needed / _GIGABYTE:.1f} GB to be built, "
            f"{free / _GIGABYTE:.1f} GB are free in {place.home}; make room, or set GPUFLOW_ENV_DIR to a larger disk"
        )
