"""What an environment is made of: its pins, its variants, and the check that it works.

A definition is a YAML file: shipped in configs/environments, or the user's own `NAME.yaml` in GPUFLOW_ENV_DIR. Called
by the rest of this package and by `gpuflow env`. It builds nothing and knows no folder but that of the definitions.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings
from gpuflow.spec.presets import list_presets, preset_path
from gpuflow.spec.reading import read_file

#: For machines without a GPU, or with one.
Variant = Literal["cpu", "cuda"]
VARIANTS: Final[tuple[Variant, ...]] = ("cpu", "cuda")
#: The environment of executors that name none: what is installed beside gpuflow, unless it was built.
DEFAULT: Final = "default"

_KIND: Final = "environments"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST_CHARACTERS: Final = 10


class UnknownEnvironment(GPUFlowError):
    """No environment has that name."""


def _pinned(text: str) -> str:
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is no requirement ({error}); write name==version") from None
    exact = len(wanted.specifier) == 1 and all(
        one.operator in ("==", "===") and not one.version.endswith(".*") for one in wanted.specifier
    )
    if not exact and wanted.url is None:
        raise ValueError(f"{text!r} names no exact version; write {wanted.name}==version")
    return text


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is no range of versions; write one such as >=3.11,<3.14") from None
    return text


Pin = Annotated[str, AfterValidator(_pinned)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipe(_Part):
    """How one variant is built. `steps` are calls of pip, one after the other; `size_gb` is what it takes on disk."""

    steps: tuple[tuple[Pin, ...], ...]
    uninstall: tuple[str, ...] = ()
    size_gb: float = Field(gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    code: str = ""

    @property
    def pins(self) -> tuple[str, ...]:
        """Every pin, in the order of the steps."""
        return tuple(pin for step in self.steps for pin in step)


class CheckPart(_Part):
    """What a working environment can import, and in which time, in seconds."""

    imports: tuple[str, ...] = ()
    timeout_seconds: float = Field(default=180, gt=0, le=3600)


class Definition(_Part):
    """One environment. `task_types` maps a task type to the modules that its executor loads.

    `engine` is what answers in it, for task types that have a choice.
    """

    name: str
    description: str = ""
    engine: str = ""
    task_types: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    python: Annotated[str, AfterValidator(_specifier)] = ">=3.11"
    variants: dict[Variant, Recipe] = Field(min_length=1)
    check: CheckPart = CheckPart()

    @model_validator(mode="after")
    def _has_steps(self) -> Self:
        empty = [variant for variant, recipe in self.variants.items() if not recipe.pins]
        if empty:
            raise ValueError(f"the variant {empty[0]} installs nothing; give it steps")
        return self

    def recipe(self, variant: Variant) -> Recipe:
        """Return how a variant is built. Raises GPUFlowError when the environment has no such variant."""
        found = self.variants.get(variant)
        if found is None:
            raise GPUFlowError(
                f"environment {self.name!r} has no variant {variant!r}; it has {', '.join(self.variants)}"
            )
        return found

    def digest(self, variant: Variant) -> str:
        """Return the digest of what is installed: it changes with the pins and the steps, and with nothing else."""
        recipe = self.recipe(variant)
        built = {"steps": recipe.steps, "uninstall": recipe.uninstall}
        return hashlib.sha256(json.dumps(built, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARACTERS]


def names(settings: Settings) -> list[str]:
    """Return the names of all environments: the shipped ones, and the user's in GPUFLOW_ENV_DIR."""
    own = {path.stem for path in settings.env_dir.glob("*.yaml") if _NAME.fullmatch(path.stem)}
    return sorted({*list_presets(_KIND), *own})


def is_name(name: str) -> bool:
    """Say whether an environment may have that name: it is that of a file and of a folder."""
    return _NAME.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Say whether an environment is one of the user's, not a shipped one."""
    return name not in list_presets(_KIND)


def load(settings: Settings, name: str) -> Definition:
    """Return an environment. Raises UnknownEnvironment naming near matches, GPUFlowError for a file with mistakes."""
    known = names(settings)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        mend = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
        raise UnknownEnvironment(f"no environment {name[:60]!r}; {mend}")
    path = preset_path(_KIND, name) if name in list_presets(_KIND) else settings.env_dir / f"{name}.yaml"
    try:
        return _parsed(name, path, path.stat().st_mtime_ns)
    except OSError as error:
        raise GPUFlowError(f"{path} cannot be read: {error.strerror}; mend its rights") from None


@lru_cache(maxsize=64)
def _parsed(name: str, path: Path, _: int) -> Definition:
    """Read a definition, once for each state of its file: a worker asks before each child."""
    try:
        return Definition.model_validate({**_read(path), "name": name})
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors(include_url=False, include_input=False)
        )
        raise GPUFlowError(f"{path} is not a valid environment: {mistakes}") from None


def _read(path: Path) -> dict[str, object]:
    document = read_file(path)
    if not isinstance(document.data, dict):
        raise GPUFlowError(f"{path} is not a mapping; write fields with names")
    return document.data
