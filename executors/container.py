"""The task type `container`: an image in a container engine, or its preset as a plain process where there is none.

Both speak the event protocol on stdout, and end as their `finish` event and their exit code say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from executors import cancellation
from executors.base import Executor, ExecutorError, bad_input
from executors.containers import engine as engines
from executors.containers.plan import MODELS, binds_of, environment_of, gpus_of, user_of
from executors.programs.heard import CONTAINER, WORKER, Heard, Kind, check
from executors.programs.running import Ran, follow, run
from gpuflow.protocol import Emitter, Request
from gpuflow.spec.patterns import metric_pattern

#: Labels of every container, by which the worker finds those of a dead attempt (gpuflow.worker.containers.removal).
_LABELS: Final = ("gpuflow.run", "gpuflow.task", "gpuflow.attempt", "gpuflow.lock")


class Container(Executor):
    """Runs `spec.container` and gives back its exit code, its metrics, and what it said."""

    task_types: ClassVar[tuple[str, ...]] = ("container",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Run the container or process to its end. Raises ExecutorError for one that cannot be run, or that fails."""
        section: Mapping[str, Any] = request.spec["container"]
        if "run" not in section:
            raise bad_input("the container section was not prepared; run it by a worker or `gpuflow executor run`")
        output_dir = Path(request.output_dir)
        Path(request.checkpoint_dir or output_dir).mkdir(parents=True, exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        patterns = {name: metric_pattern(text) for name, text in section["metrics"].items()}
        heard = Heard(emitter, patterns)
        claimed = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        gpus = gpus_of(section, claimed)
        model = _model(request, section, emitter)
        start = _in_engine if section["engine"] else _as_process
        ran, kind, how = start(request, section, emitter, heard, gpus, model)
        check(ran, heard, kind)
        heard.close()
        return {
            **heard.value(output_dir),
            "exit_code": ran.code,
            "metrics": heard.metrics,
            "output": heard.output(),
            **how,
        }


def _in_engine(
    request: Request,
    section: Mapping[str, Any],
    emitter: Emitter,
    heard: Heard,
    gpus: tuple[str, ...],
    model: str | None,
) -> tuple[Ran, Kind, dict[str, Any]]:
    """Run a container to its end. Nothing of it is left then."""
    engine = engines.Engine(section["engine"])
    image = engine.image_id(section["image"], section["pull"], emitter)
    lock = Path(section["lock"])
    with engines.locked(lock), cancellation.notice_held():
        marks = (section["run"], request.task_id, str(request.attempt), str(lock))
        wanted = engines.Wanted(
            image=image,
            command=section["command"],
            entrypoint=section["entrypoint"],
            environment=environment_of(request, section, os.environ, gpus, MODELS if model else None),
            workdir=section["workdir"],
            network=section["network"],
            binds=binds_of(request, section, model),
            gpus=gpus,
            memory_bytes=section["memory_bytes"],
            cpus=section["cpus"],
            pids=section["pids"],
            shm_bytes=section["shm_bytes"],
            init=section["init"],
            labels=dict(zip(_LABELS, marks, strict=True)),
            name=f"gpuflow-{section['run']}",
        )
        emitter.status("working", f"{section['image']} by {engine.name}")
        container = engine.start(wanted, user_of(section, is_rootless=engine.is_rootless))
        try:
            ran = follow(
                container,
                on_stdout=heard.stdout,
                on_stderr=heard.stderr,
                timeout_seconds=section["timeout_seconds"],
            )
            if ran.code and container.is_out_of_memory():
                limit = f"{section['memory_bytes'] >> 20} MiB" if section["memory_bytes"] else "the machine"
                raise ExecutorError(
                    "OutOfMemory",
                    f"the container used more memory than its limit, {limit}; raise `memory` of its preset, or "
                    "resources.hardware.memory",
                    retryable=True,
                )
        finally:
            container.remove(lock)
    how = {"ran_as": "container", "engine": engine.name, "image": section["image"], "image_id": image}
    return ran, CONTAINER, how


def _as_process(
    request: Request,
    section: Mapping[str, Any],
    emitter: Emitter,
    heard: Heard,
    gpus: tuple[str, ...],
    model: str | None,
) -> tuple[Ran, Kind, dict[str, Any]]:
    """Run a preset as a plain process of the worker, and say so."""
    process = section["process"]
    why = section["no_engine"]
    if process is None:
        what = (
            f"preset {section['preset']} has no `process`" if section["preset"] else "an image runs in an engine only"
        )
        raise ExecutorError(
            "EngineUnavailable", f"{why}, and {what}; start Docker or Podman on this worker", retryable=True
        )
    lacking = [name for name in ("memory_bytes", "cpus", "network", "mounts", "user") if section[name]]
    message = f"{section['preset']} runs as a plain process, not in a container: {why}"
    if lacking:
        message += f"; not applied: {', '.join(name.removesuffix('_bytes') for name in lacking)}"
    emitter.status("fallback", message)
    folder = Path(process["folder"] or request.output_dir)
    if not folder.is_dir():
        raise bad_input(f"container preset {section['preset']}: its process.folder {folder} is no folder; correct it")
    environment = {**os.environ, **environment_of(request, section, os.environ, gpus, model)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    emitter.status("working")
    ran = run(
        process["command"],
        cwd=folder,
        environment=environment,
        on_stdout=heard.stdout,
        on_stderr=heard.stderr,
        timeout_seconds=section["timeout_seconds"],
    )
    return ran, WORKER, {"ran_as": "process", "fallback": message, "image": section["image"]}


def _model(request: Request, section: Mapping[str, Any], emitter: Emitter) -> str | None:
    """Return the folder of the model on this machine: the one of the task or preset; None for a name alone."""
    source = (request.spec.get("model") or {}).get("source") or {}
    if source.get("type") == "preset":
        from executors.modeling.location import resolve

        place = resolve(request.spec["model"], request.cache_dir, emitter).place
        return place if Path(place).is_dir() else None
    path = section.get("model_path")
    return str(path) if path else None
