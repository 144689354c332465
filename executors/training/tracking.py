"""Where the trackers of `training.report_to` write: into the output folder, unless the environment says otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from executors import task_access
from executors.training.requirements import trackers_of
from gpuflow.errors import NotAllowed
from gpuflow.policy.connecting import judged_addresses
from gpuflow.protocol import Emitter, Request

#: Tracker -> its folder in the output folder.
_FOLDERS: Final[Mapping[str, str]] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlruns"}
#: Variables by which a task says where its trackers send, and the ports of the schemes that it may give.
_SERVERS: Final = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "WANDB_BASE_URL")
_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443}


def prepare_tracking(request: Request) -> None:
    """Set the variables of the trackers that a task asks for; what the environment has already wins.

    W&B works offline where there is no WANDB_API_KEY, so that a task never waits for a login. Raises NotAllowed for a
    server that the task may not reach.
    """
    training: Mapping[str, Any] = request.spec.get("training") or {}
    if trackers_of(training):
        _judge_servers(request.spec.get("env") or {})
    for name in trackers_of(training):
        if name not in _FOLDERS:
            continue
        folder = Path(request.output_dir) / _FOLDERS[name]
        if name == "tensorboard":
            os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder))
        elif name == "wandb":
            Path(request.output_dir).mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("WANDB_DIR", request.output_dir)
            if not os.environ.get("WANDB_API_KEY"):
                os.environ.setdefault("WANDB_MODE", "offline")
        else:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_TRACKING_URI", folder.absolute().as_uri())


def _judge_servers(env: Mapping[str, Any]) -> None:
    """Raise NotAllowed where a task's own variables send trackers to a folder, or to a host that tasks do not reach."""
    hosts = task_access.hosts()
    for name in _SERVERS:
        url = os.environ.get(name)
        if hosts is None or name not in env or not url:
            continue
        try:
            parts = urlsplit(url)
            port, host = parts.port or _PORTS[parts.scheme], parts.hostname or ""
        except (KeyError, ValueError):
            raise NotAllowed(
                f"env.{name} names no server; give its http(s) address, or set the variable on the worker"
            ) from None
        try:
            judged_addresses(host, port, hosts)
        except (OSError, UnicodeError) as error:
            raise NotAllowed(f"env.{name}: {host} has no address; correct it") from error


def finish_tracking(request: Request, emitter: Emitter) -> None:
    """End the runs of the trackers, so that all of it is written, and declare the folders that they wrote to."""
    training: Mapping[str, Any] = request.spec.get("training") or {}
    for name in trackers_of(training):
        # Only what the trainer has loaded: a rank that reports nothing has no run.
        library = sys.modules.get(name)
        if library is not None and name == "wandb":
            library.finish()
            library.teardown()
        elif library is not None and name == "mlflow":
            library.end_run()
        folder = _FOLDERS.get(name)
        if folder and (Path(request.output_dir) / folder).is_dir():
            emitter.artifact(folder)
