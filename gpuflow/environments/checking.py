"""Whether an environment works: its Python starts, the pins are what is installed, its modules load, its snippet runs.

Called by `building` before an environment counts as built, and by `gpuflow env check`. What is loaded is loaded in the
environment's own Python, never here.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker as WhereMarker
from packaging.requirements import Requirement

from gpuflow.environments.attached import attached
from gpuflow.environments.definition import CheckPart, Recipe
from gpuflow.environments.packages import packages_path
from gpuflow.settings import Settings

#: Prints what it finds as the last line of stdout. argv: imports, distributions, code.
_PROGRAM: Final = """
import json, sys
from importlib import import_module, metadata
wanted = json.loads(sys.argv[1])
found = {"python": sys.version.split()[0], "versions": {}, "failed": None}
for name in wanted["distributions"]:
    try:
        found["versions"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found["versions"][name] = None
try:
    for name in wanted["imports"]:
        at = f"import {name}"
        import_module(name)
    at = "its check"
    exec(compile(wanted["code"], "check", "exec"), {"__name__": "check"})
except BaseException as error:
    found["failed"] = f"{at}: {type(error).__name__}: {error}"
print("\\n" + json.dumps(found), flush=True)
sys.exit(1 if found["failed"] else 0)
"""
#: What a child imports of ours before it knows its executor.
_OURS: Final = ("gpuflow.protocol", "gpuflow.spec.presets", "executors.__main__")
#: Variables of ours that would lead the environment's Python astray.
_MISLEADING: Final = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
    "COVERAGE_PROCESS_CONFIG",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIREMENT",
)
#: Variables that no Python of an environment needs: its own environment is open to other processes of this user.
_SECRET: Final = ("REDIS_URL", "GPUFLOW_*TOKEN*", "CELERY_*", "FLOWER_*")
_TAIL_CHARACTERS: Final = 300


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found. `problem` is empty when the environment works; `versions` are those of its pins."""

    problem: str
    python_version: str
    versions: Mapping[str, str | None]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it works."""
        return not self.problem


def check(settings: Settings, python: Path, recipe: Recipe, part: CheckPart) -> Finding:
    """Check an environment by its Python. Never raises for what is wrong with it."""
    pins = [wanted for pin in recipe.pins if _applies(wanted := Requirement(pin))]
    asked = {
        "imports": [*_OURS, *part.imports],
        "distributions": [*(pin.name for pin in pins), *recipe.uninstall],
        "code": recipe.code,
    }
    started = time.monotonic()
    try:
        with attached(
            python,
            ["-P"],
            _PROGRAM,
            [json.dumps(asked)],
            env=clean_environment(recipe.env) | {"PYTHONPATH": str(packages_path(settings))},
            stderr=subprocess.PIPE,
        ) as process:
            out, err = process.communicate(timeout=part.timeout_seconds)
    except subprocess.TimeoutExpired:
        problem = f"its check was not done after {part.timeout_seconds:g} s"
        return Finding(problem=problem, python_version="", versions={}, seconds=time.monotonic() - started)
    except OSError as error:
        problem = f"its Python {python} cannot be started: {error.strerror or error}"
        return Finding(problem=problem, python_version="", versions={}, seconds=time.monotonic() - started)
    found = _answer(out)
    return Finding(
        problem=_problem(found, pins, recipe, process.returncode, err),
        python_version=str(found.get("python", "")),
        versions={pin.name: found.get("versions", {}).get(pin.name) for pin in pins},
        seconds=time.monotonic() - started,
    )


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's variables without those that mislead another Python or are secret, and with `given`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _MISLEADING and not any(fnmatch.fnmatchcase(name, secret) for secret in _SECRET)
    }
    return {**kept, **(given or {})}


def _applies(wanted: Requirement) -> bool:
    return wanted.marker is None or WhereMarker(str(wanted.marker)).evaluate()


def _answer(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problem(found: Mapping[str, Any], pins: list[Requirement], recipe: Recipe, code: int, said: str) -> str:
    if not found:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        last = " ".join(said.split())[-_TAIL_CHARACTERS:]
        return f"its check {how}" + (f": {last}" if last else "")
    versions = found.get("versions", {})
    for pin in pins:
        version = versions.get(pin.name)
        if version is None:
            return f"{pin.name} is not installed"
        if pin.url is None and not pin.specifier.contains(version, prereleases=True):
            return f"{pin.name} is {version}, not {str(pin.specifier).lstrip('=')}"
    for name in recipe.uninstall:
        if versions.get(name) is not None:
            return f"{name} {versions[name]} is installed, which must not be there"
    return " ".join(str(found["failed"]).split())[: 2 * _TAIL_CHARACTERS] if found.get("failed") else ""


def this_python() -> Path:
    """Return the Python of this process, whose environment the default one is unless it was built."""
    return Path(sys.executable)
