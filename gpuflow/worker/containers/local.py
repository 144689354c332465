"""From the `container` section of a task to what its child creates: preset, limits, mounts, engine, and the policy.

Called by the preparation of an attempt and by `gpuflow executor run`, before the child. Everything that the operator
decides is decided here; the child finds plain values.
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.protocol import Request
from gpuflow.settings import Settings
from gpuflow.spec.container_policy import ContainerAsk, ContainerPolicy, refusal, split_mount
from gpuflow.spec.container_presets import ContainerPreset, container_preset, preset_images
from gpuflow.spec.models_kinds import Container
from gpuflow.spec.units import cpu_count, duration_seconds, memory_mib
from gpuflow.worker.containers import removal
from gpuflow.worker.containers.engines import find_engine
from gpuflow.worker.merged_inputs import refuse_variables

#: Folder of the state folder with the lock files of running containers.
LOCKS: Final = "containers"


class ContainerRefused(GPUFlowError):
    """This worker does not run the container that a task asks for."""


def local_container(spec: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a spec whose `container` holds all that its child needs; any other spec as it is.

    Raises InvalidTemplate for what cannot be, ContainerRefused for what the worker's settings do not allow, OSError.
    """
    section = spec.get("container")
    if spec.get("taskType") != "container" or not isinstance(section, Mapping):
        return dict(spec)
    try:
        # Once more: a reference to another stage may have become anything.
        checked = Container.model_validate(dict(section)).model_dump(exclude_none=True)
        return {**spec, "container": _local(spec, checked, settings)}
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in ("container", *mistake["loc"]))
        raise InvalidTemplate(f"{field}: {mistake['msg'].removeprefix('Value error, ')}; correct it") from None
    except (ValueError, TypeError) as error:
        raise InvalidTemplate(f"container: {error}; correct it") from error


def _local(spec: Mapping[str, Any], section: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    preset, folder = _preset(section, settings)
    _check_mode(preset, section)
    named = [split_mount_or_fail(text) for text in section.get("mounts") or ()]
    mounts = [{"source": _resolved(source), "target": target, "read_only": True} for source, target in named]
    model = _model_path(spec)
    paths = [str(mount["source"]) for mount in mounts] + ([model] if model else [])
    why = refusal(ContainerAsk(image=preset.image, host_paths=tuple(paths)), policy_of(settings))
    if why is not None:
        raise ContainerRefused(why)
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        raise InvalidTemplate(f"container: there is no {missing[0]} on this worker; correct it, or put it there")
    engine = find_engine(settings.container_engine)
    if engine.path is None:
        refuse_variables(section.get("env_vars") or {})
    run = uuid.uuid4().hex
    locks = settings.state_dir / LOCKS
    is_session = preset.mode == "session"
    # A template may run what it likes where a container confines it, and only there.
    confined = next((name for name in ("command", "entrypoint", "workdir") if section.get(name)), "")
    return {
        **_limits(preset, section, spec),
        "preset": section.get("preset"),
        "image": preset.image,
        "command": _argv(section.get("command") or preset.command, "command"),
        "entrypoint": _argv(section.get("entrypoint") or preset.entrypoint, "entrypoint"),
        "env": {**preset.env, **(section.get("env_vars") or {})},
        "workdir": section.get("workdir") or preset.workdir,
        "user": preset.user,
        "network": section.get("network") or preset.network,
        "mounts": [mount.model_dump() for mount in preset.mounts] + mounts,
        "model_path": model or preset.model_path,
        "metrics": section.get("metrics") or {},
        "init": preset.init,
        "pull": preset.pull,
        "process": None if confined else _process(preset, folder),
        "engine": engine.path,
        "brings": confined,
        "no_engine": f"{engine.why}, without which {confined} of a template is not run" if confined else engine.why,
        "run": run,
        "lock": str(locks / f"{run}.lock"),
        "mode": preset.mode,
        "request": section.get("request"),
        "idle_seconds": _seconds(preset.idle_timeout),
        "lifetime_seconds": _seconds(preset.max_lifetime),
        # The container of a session outlives the folders of its first task; removal.py knows it by the lock's name.
        "exchange": str(locks / run) if is_session and engine.path is not None else None,
    }


def policy_of(settings: Settings) -> ContainerPolicy:
    """Return what a worker with these settings allows."""
    return ContainerPolicy(
        preset_images=preset_images(settings.container_presets),
        images=settings.container_images,
        mount_roots=tuple(os.path.realpath(root) for root in settings.container_mounts),
    )


def removal_of(request: Request) -> tuple[str, ...]:
    """Return the command that removes the containers of a request after its child; empty where there can be none."""
    section = request.spec.get("container")
    if request.task_type != "container" or not isinstance(section, Mapping) or not section.get("engine"):
        return ()
    return (sys.executable, "-I", "-S", removal.__file__, *(str(section[name]) for name in ("engine", "run", "lock")))


def _check_mode(preset: ContainerPreset, section: Mapping[str, Any]) -> None:
    """Raise InvalidTemplate where a request is lacking, or where nobody would answer it."""
    has_request = section.get("request") is not None
    if preset.mode == "session" and not has_request:
        raise InvalidTemplate(
            f"container.request: preset {section.get('preset')} answers requests (mode: session); give one"
        )
    if preset.mode != "session" and has_request:
        raise InvalidTemplate(
            f"container.request: preset {section.get('preset')} takes no requests; leave it out, or add "
            "`mode: session` to the preset"
        )


def _seconds(duration: Any) -> float | None:
    return duration_seconds(duration) if duration is not None else None


def split_mount_or_fail(text: str) -> tuple[str, str]:
    """Return the two paths of a mount. Raises InvalidTemplate."""
    try:
        return split_mount(str(text))
    except ValueError as error:
        raise InvalidTemplate(f"container.mounts: {error}") from error


def _preset(section: Mapping[str, Any], settings: Settings) -> tuple[ContainerPreset, Path | None]:
    """Return the preset of a section and the folder that it is in; for an image by itself, one with that image."""
    name = section.get("preset")
    if name:
        preset, path = container_preset(str(name), settings.container_presets)
        return preset, path.parent
    image = str(section.get("image"))
    why = refusal(ContainerAsk(image=image), policy_of(settings))
    if why is not None:
        raise ContainerRefused(why)
    return ContainerPreset(image=image), None


def _resolved(path: str) -> str:
    return os.path.realpath(path)


def _model_path(spec: Mapping[str, Any]) -> str | None:
    """Return the folder of a local model that the template names, links resolved."""
    source = (spec.get("model") or {}).get("source") or {}
    identifier = str(source.get("identifier") or "")
    is_local = source.get("type") == "local" or (source.get("type") is None and identifier.startswith("/"))
    if not is_local:
        return None
    if not identifier.startswith("/") or "${" in identifier:
        raise InvalidTemplate(
            f"model.source.identifier: {identifier[:200]!r} of a container task is no absolute path; give one"
        )
    return _resolved(identifier)


def _limits(preset: ContainerPreset, section: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits: those of the preset, and no more than what the task asks of the machine."""
    asked = (spec.get("resources") or {}).get("hardware") or {}
    memory = [memory_mib(amount) for amount in (preset.memory, asked.get("memory")) if amount is not None]
    cpus = [cpu_count(amount) for amount in (preset.cpus, asked.get("cpu")) if amount is not None]
    return {
        "memory_bytes": min(memory) << 20 if memory else None,
        "cpus": min(cpus) if cpus else None,
        "pids": preset.pids,
        "shm_bytes": memory_mib(section.get("shm_size") or preset.shm_size) << 20,
        "gpus": preset.gpus,
        "timeout_seconds": _seconds(preset.timeout),
    }


def _process(preset: ContainerPreset, folder: Path | None) -> dict[str, Any] | None:
    """Return how it runs as a plain process, which only a preset can say."""
    if preset.process is None or folder is None:
        return None
    command = preset.process.command or preset.command
    place = (folder / Path(preset.process.folder).expanduser()).resolve() if preset.process.folder else None
    return {"folder": str(place) if place else None, "command": _argv(command, "command")}


def _argv(command: str | Sequence[Any] | None, field: str) -> list[str] | None:
    """Return a command as words; a line is split as a shell would, and given to none. Raises InvalidTemplate."""
    if command is None:
        return None
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise InvalidTemplate(f"container.{field} cannot be split into words: {error}; give a list") from error
    if not words:
        raise InvalidTemplate(f"container.{field} is empty; give a program")
    return words
