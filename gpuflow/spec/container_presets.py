"""Container presets: an image and how it is run, shipped in configs/containers or in a folder of the operator's.

Read by workers and by `gpuflow presets`; a preset is trusted as a setting is. `image` and `env` have the aliases
`docker_image` and `env_vars`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, AliasChoices, Field, ValidationError, model_validator

from gpuflow.errors import GPUFlowError
from gpuflow.spec.container_policy import read_image
from gpuflow.spec.models_types import (
    RESERVED_ENV,
    Cpus,
    Duration,
    Flag,
    Memory,
    Name,
    Strict,
    Text,
    TextOrList,
    Whole,
)
from gpuflow.spec.presets import configs_root
from gpuflow.spec.reading import read_file

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: A preset may say what these are where the task names no model.
_MODEL_ENV: Final = frozenset({"MODEL_NAME", "MODEL_PATH"})
_PRESET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _image(value: str) -> str:
    read_image(value)
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in PurePosixPath(value).parts:
        raise ValueError(f"{value!r} must be an absolute path without ..")
    return value


def _preset_env(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise ValueError(f"{value[:60]!r} is no name of an environment variable; use letters, digits and _")
    if value in RESERVED_ENV - _MODEL_ENV:
        raise ValueError(f"{value} is set by gpuflow; choose another name")
    return value


AbsolutePath = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_absolute)]


class PresetMount(Strict):
    """A folder or file of the worker that the container sees."""

    source: AbsolutePath
    target: AbsolutePath
    read_only: Flag = True


class PresetProcess(Strict):
    """How the preset runs as a plain process: `folder` is where the image has its working folder."""

    folder: Name | None = Field(None, description="Relative to the preset's file, or absolute")
    command: TextOrList | None = Field(None, description="In place of the container's command")


class ContainerPreset(Strict):
    """An image and how it is run."""

    description: str | None = None
    image: Annotated[str, AfterValidator(_image)] = Field(validation_alias=AliasChoices("image", "docker_image"))
    command: TextOrList | None = None
    entrypoint: TextOrList | None = None
    env: dict[Annotated[str, AfterValidator(_preset_env)], Text] = Field(
        default_factory=dict, validation_alias=AliasChoices("env", "env_vars")
    )
    workdir: AbsolutePath | None = None
    user: Text | None = None
    mounts: list[PresetMount] = Field(default_factory=list, max_length=100)
    model_path: AbsolutePath | None = Field(None, description="Model folder on the worker, mounted at /models")
    gpus: Whole | None = Field(None, ge=0, le=1024, description="Least count of GPUs; 0: it sees none")
    memory: Memory | None = None
    cpus: Cpus | None = None
    pids: Whole = Field(4096, ge=1, le=4_194_304)
    shm_size: Memory = "1Gi"
    network: Name | None = None
    init: Flag = True
    pull: Literal["missing", "always", "never"] = "missing"
    timeout: Duration | None = Field(None, description="Limit of a run; of each request, and of the load, of a session")
    process: PresetProcess | None = None
    mode: Literal["one-off", "session"] = Field("one-off", description="session: one container answers many requests")
    idle_timeout: Duration | None = Field(None, description="A session without a request for so long is ended")
    max_lifetime: Duration | None = Field(None, description="A session that is so old takes no more requests")

    @model_validator(mode="after")
    def _has_limits_of_its_mode(self) -> ContainerPreset:
        for name in ("idle_timeout", "max_lifetime"):
            if self.mode != "session" and getattr(self, name) is not None:
                raise ValueError(f"{name} is of sessions only; add `mode: session`")
        return self

    @model_validator(mode="after")
    def _can_run_as_a_process(self) -> ContainerPreset:
        if self.process is not None and self.process.command is None and self.command is None:
            raise ValueError("process has no command, and the preset has none either; give process.command")
        if self.process is not None and self.process.folder is None and self.mode == "session":
            raise ValueError("process has no folder, and a session runs in none of a task; give process.folder")
        return self


def preset_files(own: Path | None) -> dict[str, Path]:
    """Return the file of each container preset by its name; the operator's own hide shipped ones of the same name."""
    found: dict[str, Path] = {}
    for folder in (configs_root() / "containers", own):
        if folder is not None:
            found |= {path.stem: path for path in sorted(folder.glob("*.yaml")) if _PRESET_NAME.fullmatch(path.stem)}
    return dict(sorted(found.items()))


def container_preset(name: str, own: Path | None) -> tuple[ContainerPreset, Path]:
    """Return a preset and its file. Raises GPUFlowError: unknown, with near matches, or its mistakes."""
    files = preset_files(own)
    path = files.get(name)
    if path is None:
        near = difflib.get_close_matches(name, files, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(files) or 'none'}"
        raise GPUFlowError(
            f"container.preset: {name[:60]!r} is neither shipped nor in GPUFLOW_CONTAINER_PRESETS of this worker; {fix}"
        )
    return read_preset(path), path


def read_preset(path: Path) -> ContainerPreset:
    """Return the preset of a file. Raises GPUFlowError naming the file and its first mistake."""
    try:
        return ContainerPreset.model_validate(read_file(path, name=path.name).data)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in mistake["loc"]) or "preset"
        cause = mistake["msg"].removeprefix("Value error, ")
        raise GPUFlowError(f"{path}: {field}: {cause}; correct the preset") from None


def preset_images(own: Path | None) -> tuple[str, ...]:
    """Return the images of all presets; a preset that cannot be read has none."""
    images = []
    for path in preset_files(own).values():
        try:
            images.append(read_preset(path).image)
        except (GPUFlowError, OSError):
            continue
    return tuple(images)
