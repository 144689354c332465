"""Environments as a build leaves them, whose Python is a script of the test's."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from gpuflow.environments import Place, load
from gpuflow.environments.places import Marker, interpreter
from gpuflow.secrets import Redactor
from gpuflow.settings import Settings
from gpuflow.worker.sessions.opening import Opening

_SCRIPT = Path(__file__).with_name("scripted_session.py")
#: A Python that runs a session without a model, whatever it is asked to run.
SCRIPTED = f'#!/bin/sh\nexec {sys.executable} -I {_SCRIPT} "$@"\n'


def scripted(variables: str = "same", **environment: str) -> Opening:
    """Return how a session without a model is begun; its secret is `topsecret`."""
    line = json.dumps({"op": "open", "engine": "vllm", "spec": {"model": {"source": {"identifier": "/m"}}}})
    return Opening(
        title="m",
        argv=(sys.executable, "-I", str(_SCRIPT), "session"),
        line=line,
        environment={"PATH": os.environ["PATH"], **environment},
        redactor=Redactor(["topsecret"]),
        variables=variables,
    )


def build(env_dir: Path, script: str, name: str = "vllm", variant: str = "cpu") -> Path:
    """Make an environment whose Python is `script`; return the script."""
    settings = Settings.load(env={"GPUFLOW_ENV_DIR": str(env_dir)}, cwd=env_dir.parent)
    place = Place(settings, name, variant)
    place.home.mkdir(parents=True, exist_ok=True)
    folder = place.new_folder("0")
    python = interpreter(folder)
    python.parent.mkdir()
    python.write_text(script)
    python.chmod(0o755)
    place.commit(
        Marker(
            name=name,
            variant=variant,
            digest=load(settings, name).digest(variant),
            folder=folder.name,
            python_version="3",
            built_at=time.time(),
            build_seconds=1,
            size_bytes=1,
        )
    )
    return python
