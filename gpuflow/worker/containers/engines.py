"""Finds the container engine of the machine: Docker or Podman, by its Unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CONNECT_SECONDS: Final = 5.0
_UNIX: Final = "unix://"


@dataclass(frozen=True, kw_only=True)
class ContainerEngineSocket:
    """The socket path of an engine, None for none; `why` there is none, and whether the operator named one."""

    path: str | None
    why: str = ""
    is_named: bool = False


def find_engine(setting: str, environ: Mapping[str, str] = os.environ) -> ContainerEngineSocket:
    """Return the engine of a setting `container_engine`: a named one as it is, `auto` the first that answers."""
    if setting == "none":
        return ContainerEngineSocket(path=None, why="GPUFLOW_CONTAINER_ENGINE is none")
    if setting != "auto":
        return ContainerEngineSocket(path=setting.removeprefix(_UNIX), is_named=True)
    problems = []
    for path in dict.fromkeys(_usual_places(environ)):
        problem = _problem(path)
        if problem is None:
            return ContainerEngineSocket(path=path)
        problems.append(f"{path}: {problem}")
    return ContainerEngineSocket(path=None, why=f"no container engine answers ({'; '.join(problems)})")


def _usual_places(environ: Mapping[str, str]) -> Iterator[str]:
    host = environ.get("DOCKER_HOST", "")
    if host.startswith(_UNIX):
        yield host.removeprefix(_UNIX)
    yield "/var/run/docker.sock"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    for base in (runtime, "/run"):
        if base.startswith("/"):
            yield str(Path(base, "podman", "podman.sock"))


def _problem(path: str) -> str | None:
    """Return why nothing answers at a socket; None where something does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return None
