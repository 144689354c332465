"""Starts what a container section asks for: a container in an engine, or the preset as a plain process of the worker.

Both are made in two steps, so that what can be refused is refused, and the image is there, before anything starts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from executors.base import ExecutorError, bad_input
from executors.containers import engine as engines
from executors.containers.plan import MODELS, binds_of, environment_of, gpus_of, user_of
from executors.programs.heard import CONTAINER, WORKER, Kind
from executors.programs.running import Process, Talking
from gpuflow.protocol import Emitter, Request

#: Labels of every container, by which the worker finds those of a dead attempt (gpuflow.worker.containers.removal).
_LABELS: Final = ("gpuflow.run", "gpuflow.task", "gpuflow.attempt", "gpuflow.lock")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to run: the request with its prepared section, the GPUs that it sees, and the folder of its model.

    `gpus` are UUIDs, `model` a path on this machine; None for a model by name only, and for none.
    """

    request: Request
    section: Mapping[str, Any]
    gpus: tuple[str, ...]
    model: str | None


class Starter(Protocol):
    """What can be started now. `kind` names it in errors, `how` are fields of the result that say how it runs."""

    kind: Kind
    how: Mapping[str, Any]

    def started(self, *, talks: bool = False) -> contextlib.AbstractContextManager[Talking]:
        """Start it; nothing of it is left after the block. With `talks` it can be written to.

        Raises ExecutorError.
        """

    def check_memory(self, code: int) -> None:
        """Raise ExecutorError: OutOfMemory where an exit code means that. Called within the block of `started`."""


def launch_of(request: Request, emitter: Emitter) -> Launch:
    """Return what a request asks for. Raises ExecutorError for a section without preparation, or too few GPUs."""
    section: Mapping[str, Any] = request.spec["container"]
    if "run" not in section:
        raise bad_input("the container section was not prepared; run it by a worker or `gpuflow executor run`")
    claimed = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return Launch(
        request=request,
        section=section,
        gpus=gpus_of(section, claimed),
        model=_model_folder(request, section, emitter),
    )


def starter_of(launch: Launch, emitter: Emitter) -> Starter:
    """Return what can start it on this worker: its engine, or a process where none is. Raises ExecutorError."""
    return _InEngine(launch, emitter) if launch.section["engine"] else _AsProcess(launch, emitter)


class _InEngine:
    """A container of the worker's engine."""

    kind = CONTAINER

    def __init__(self, launch: Launch, emitter: Emitter) -> None:
        section = launch.section
        self._launch, self._emitter = launch, emitter
        self._engine = engines.ContainerEngine(section["engine"])
        self._image_id = self._engine.image_id(section["image"], section["pull"], emitter)
        self._container: engines.Container | None = None
        self.how: Mapping[str, Any] = {
            "ran_as": "container",
            "engine": self._engine.name,
            "image": section["image"],
            "image_id": self._image_id,
        }

    @contextlib.contextmanager
    def started(self, *, talks: bool = False) -> Iterator[Talking]:
        """Create and start it, under the lock file by which the worker knows that this process lives."""
        section = self._launch.section
        lock, exchange = Path(section["lock"]), Path(section["exchange"]) if section["exchange"] else None
        with engines.locked(lock):
            if exchange is not None:
                exchange.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._emitter.status("loading" if talks else "working", f"{section['image']} by {self._engine.name}")
            user = user_of(section, is_rootless=self._engine.is_rootless)
            container = self._container = self._engine.start(self._wanted(lock, talks=talks), user)
            try:
                yield container
            finally:
                container.remove(lock, exchange)

    def _wanted(self, lock: Path, *, talks: bool) -> engines.Wanted:
        request, section, launch = self._launch.request, self._launch.section, self._launch
        marks = (section["run"], request.task_id, str(request.attempt), str(lock))
        inside = MODELS if launch.model else None
        return engines.Wanted(
            image=self._image_id,
            command=section["command"],
            entrypoint=section["entrypoint"],
            environment=environment_of(request, section, os.environ, launch.gpus, inside),
            workdir=section["workdir"],
            network=section["network"],
            binds=binds_of(request, section, launch.model),
            gpus=launch.gpus,
            memory_bytes=section["memory_bytes"],
            cpus=section["cpus"],
            pids=section["pids"],
            shm_bytes=section["shm_bytes"],
            init=section["init"],
            labels=dict(zip(_LABELS, marks, strict=True)),
            name=f"gpuflow-{section['run']}",
            talks=talks,
        )

    def check_memory(self, code: int) -> None:
        """Ask the engine whether the kernel ended it for its limit."""
        section = self._launch.section
        if not code or self._container is None or not self._container.is_out_of_memory():
            return
        limit = f"{section['memory_bytes'] >> 20} MiB" if section["memory_bytes"] else "the machine"
        raise ExecutorError(
            "OutOfMemory",
            f"the container used more memory than its limit, {limit}; raise `memory` of its preset, or "
            "resources.hardware.memory",
            retryable=True,
        )


class _AsProcess:
    """A preset as a plain process of the worker, which is said aloud."""

    kind = WORKER

    def __init__(self, launch: Launch, emitter: Emitter) -> None:
        section = launch.section
        self._launch, self._emitter = launch, emitter
        message = _fallback(section)
        self.how: Mapping[str, Any] = {"ran_as": "process", "fallback": message, "image": section["image"]}
        emitter.status("fallback", message)

    @contextlib.contextmanager
    def started(self, *, talks: bool = False) -> Iterator[Talking]:
        """Start it in its folder, with the environment of any task's process."""
        launch, section = self._launch, self._launch.section
        process = section["process"]
        folder = Path(process["folder"] or launch.request.output_dir)
        if not folder.is_dir():
            raise bad_input(
                f"container preset {section['preset']}: its process.folder {folder} is no folder; correct it"
            )
        given = environment_of(launch.request, section, os.environ, launch.gpus, launch.model)
        environment = {**os.environ, **given}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        self._emitter.status("loading" if talks else "working")
        yield Process.start(
            process["command"],
            cwd=folder,
            environment=environment,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        )

    def check_memory(self, code: int) -> None:
        """Nothing limits the memory of a process."""


def _fallback(section: Mapping[str, Any]) -> str:
    """Return why a preset runs as a process, and what of it has no effect. Raises ExecutorError where it cannot."""
    why = section["no_engine"]
    if section["process"] is None:
        what = (
            f"preset {section['preset']} has no `process`" if section["preset"] else "an image runs in an engine only"
        )
        raise ExecutorError(
            "EngineUnavailable", f"{why}, and {what}; start Docker or Podman on this worker", retryable=True
        )
    message = f"{section['preset']} runs as a plain process, not in a container: {why}"
    lacking = [name for name in ("memory_bytes", "cpus", "network", "mounts", "user") if section[name]]
    if lacking:
        message += f"; not applied: {', '.join(name.removesuffix('_bytes') for name in lacking)}"
    return message


def _model_folder(request: Request, section: Mapping[str, Any], emitter: Emitter) -> str | None:
    """Return the folder of the model on this machine: the one of the task or preset; None for a name alone."""
    source = (request.spec.get("model") or {}).get("source") or {}
    if source.get("type") == "preset":
        from executors.modeling.location import resolve

        place = resolve(request.spec["model"], request.cache_dir, emitter).place
        return place if Path(place).is_dir() else None
    path = section.get("model_path")
    return str(path) if path else None
