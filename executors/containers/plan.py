"""What a container is created with: environment, mounts, limits, GPUs. Pure, and the same for any engine.

The folders of an attempt or session have the same paths inside as outside, so that paths in events mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors.base import bad_input
from gpuflow.protocol import Request

#: Where a container finds its model.
MODELS: Final = "/models"
#: Variables of the child that a container is given; nothing else of the worker's environment.
_PASSED: Final = (
    "TASK_ID", "ATTEMPT", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE", "OUTPUT_DIR", "CHECKPOINT_DIR",
    "RESUME_FROM", "NOTICE_SECONDS", "MODEL_NAME", "PYTHONUNBUFFERED",
)  # fmt: skip
#: Those of one task, which a session has not: it is told of each with its request.
_OF_TASK: Final = ("TASK_ID", "ATTEMPT", "OUTPUT_DIR", "CHECKPOINT_DIR", "RESUME_FROM", "NOTICE_SECONDS")


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A folder or file of the host in the container."""

    source: str
    target: str
    read_only: bool


def gpus_of(section: Mapping[str, Any], claimed: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that the container sees, of those that are claimed. Raises ExecutorError for too few."""
    wanted = section.get("gpus")
    if wanted == 0:
        return ()
    if wanted is not None and len(claimed) < wanted:
        raise bad_input(
            f"container preset {section.get('preset')} needs {wanted} GPUs and the task holds {len(claimed)}; "
            f'ask for them: `resources: {{accelerators: ":{wanted}"}}`'
        )
    return tuple(claimed)


def environment_of(
    request: Request, section: Mapping[str, Any], child: Mapping[str, str], gpus: Sequence[str], model: str | None
) -> dict[str, str]:
    """Return the environment of the container: what the preset and the task name, and what gpuflow sets.

    `child` is the environment of this process, `model` where the container finds its model.
    """
    named = [*(request.spec.get("env") or {}), *(request.spec.get("secrets") or ())]
    given = {name: child[name] for name in (*named, *_PASSED) if name in child}
    if section["mode"] == "session":
        given = {name: value for name, value in given.items() if name not in _OF_TASK}
    else:
        given["OUTPUT_DIR"] = request.output_dir  # one of several callers has a folder of its own
    given["CUDA_VISIBLE_DEVICES"] = given["GPU_DEVICE"] = ",".join(gpus)
    # An engine whose default runtime is NVIDIA's shows all GPUs to an image that asks for all.
    given["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus) or "void"
    if model is not None:
        given["MODEL_PATH"] = model
    return {**{name: str(value) for name, value in section["env"].items()}, **given}


def binds_of(request: Request, section: Mapping[str, Any], model: str | None) -> list[Bind]:
    """Return what is mounted: the folders of the attempt or session, the model, and the named mounts."""
    binds = [Bind(**folder) for folder in _folders(request, section)]
    if model is not None:
        binds.append(Bind(source=model, target=MODELS, read_only=True))
    binds += [Bind(**mount) for mount in section["mounts"]]
    seen: set[str] = set()
    for bind in binds:
        if bind.target in seen:
            raise bad_input(f"container: {bind.target} is mounted twice; keep one")
        seen.add(bind.target)
    return binds


def _folders(request: Request, section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the folders that have the same path inside as outside.

    A session has one of its own, from which the files of each request are taken: it outlives the attempts.
    """
    if section["exchange"]:
        yield {"source": section["exchange"], "target": section["exchange"], "read_only": False}
        return
    output, checkpoints = request.output_dir, request.checkpoint_dir
    yield {"source": output, "target": output, "read_only": False}
    if checkpoints and not Path(checkpoints).is_relative_to(output):
        yield {"source": checkpoints, "target": checkpoints, "read_only": False}
    if request.resume_from:
        yield {"source": request.resume_from, "target": request.resume_from, "read_only": True}


def user_of(section: Mapping[str, Any], *, is_rootless: bool) -> str:
    """Return the user in the container: the preset's, else the one who owns the results.

    In an engine without root rights, root inside is the worker's user outside.
    """
    if section.get("user"):
        return str(section["user"])
    return "0:0" if is_rootless else f"{os.getuid()}:{os.getgid()}"
