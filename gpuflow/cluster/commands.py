"""The command lines and the environment of the processes of a local cluster. Pure but for looking at this machine.

Used by `gpuflow.cluster.local` alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.policy.hosts import LOCAL_NETWORKS
from gpuflow.private_files import make_secret
from gpuflow.settings import Settings
from gpuflow.worker.spec_policy import as_operator

#: Flower's own default.
FLOWER_PORT: Final = 5555
#: Who logs in to the Flower of a local cluster.
FLOWER_USER: Final = "gpuflow"
#: That of `gpuflow gateway`.
GATEWAY_PORT: Final = 8080
_PORTS_TRIED: Final = 50
_CONFIG_VARIABLE: Final = "GPUFLOW_CONFIG"


def worker_command(
    worker_id: str, *, log_level: str, max_jobs: int | None, gpus: str | None, include: Sequence[str] = ()
) -> list[str]:
    """Return the command line of one worker; `gpus` as `--gpus` takes it (None: all of the machine).

    `include`: modules with a team's own tasks.
    """
    # Mingle asks the other workers for what they know, and waits a second for answers: not on one machine.
    command = [*_celery("worker"), "--name", worker_id, "--loglevel", log_level, "--without-mingle"]
    if max_jobs is not None:
        command += ["--max-jobs", str(max_jobs)]
    if gpus is not None:
        command += ["--gpus", gpus]
    if include:
        command += ["--include", ",".join(include)]
    return command


def beat_command(log_level: str) -> list[str]:
    """Return the command line of beat."""
    return [*_celery("beat"), "--loglevel", log_level]


def flower_command(port: int) -> list[str]:
    """Return the command line of Flower on this machine's loopback."""
    guarded = [sys.executable, "-m", "gpuflow.process_guard", *_celery("flower")[2:]]
    return [*guarded, "--address=127.0.0.1", f"--port={port}"]


def flower_login(state_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Flower asks for a login: pages and API alike, no other site's page gets in.

    What the user has set is kept. In the environment, not on the command line, which every local user may read.
    Raises GPUFlowError where the password cannot be written.
    """
    if any(environment.get(name) for name in ("FLOWER_BASIC_AUTH", "FLOWER_AUTH")):
        return {}
    path = flower_password_file(state_dir)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {"FLOWER_BASIC_AUTH": f"{FLOWER_USER}:{make_secret(path)}", "FLOWER_UNAUTHENTICATED_API": ""}
    except OSError as error:
        raise GPUFlowError(
            f"Flower's password cannot be written to {path}: {error.strerror or error}; set GPUFLOW_STATE_DIR to "
            "a folder of yours, or start without Flower: gpuflow up --no-flower"
        ) from None


def flower_password_file(state_dir: Path) -> Path:
    """Return where the password of the local cluster's Flower is."""
    return state_dir / "flower-password"


def gateway_command(port: int) -> list[str]:
    """Return the command line of the gateway on this machine's loopback."""
    return [sys.executable, "-c", "from gpuflow.cli import main; main()", "gateway", "--port", str(port)]


def free_port(first: int) -> int:
    """Return the first free port of this machine's loopback from `first` on. Raises GPUFlowError."""
    for port in range(first, min(first + _PORTS_TRIED, 65_536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise GPUFlowError(f"no port from {first} on is free on 127.0.0.1; name another")


def flower_installed() -> bool:
    """Whether Flower is there."""
    return find_spec("flower") is not None


def gateway_installed() -> bool:
    """Whether all that the gateway needs is there."""
    return all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "python_multipart"))


def _celery(command: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "gpuflow", command]


def process_environment(
    settings: Settings, url: str, base: Mapping[str, str], folder: Path, *, own_broker: bool = False
) -> dict[str, str]:
    """Return the environment of the cluster's processes, which run in another folder than we do.

    What is relative to our folder is made absolute: paths of settings, and the settings file. With a broker of its own
    nobody else submits, so tasks may bring code, name the user's variables, and use the user's folders and networks.
    """
    opened = as_operator(settings) if own_broker else settings
    environment = {
        **base,
        "REDIS_URL": url,
        "RESULTS_DIR": str(settings.results_dir),
        "GPUFLOW_STATE_DIR": str(settings.state_dir),
        "GPUFLOW_CACHE_DIR": str(settings.cache_dir),
        "PYTHONUNBUFFERED": "1",
        **(_own_places(settings, folder) if own_broker else {}),
    }
    for variable, names in (
        ("GPUFLOW_ALLOW_CODE", opened.allow_code),
        ("GPUFLOW_ALLOW_SECRETS", opened.allow_secrets),
        ("GPUFLOW_ALLOW_BUCKETS", opened.allow_buckets),
        ("GPUFLOW_PASS_ENV", opened.pass_env),
        ("GPUFLOW_GATEWAY_FUNCTIONS", opened.gateway_functions),
    ):
        if names:
            environment[variable] = ",".join(names)
    named = base.get(_CONFIG_VARIABLE, "").strip() or "gpuflow.toml"
    config = (folder / Path(named).expanduser()).absolute()
    if config.is_file():
        environment[_CONFIG_VARIABLE] = str(config)
    return with_our_packages(environment)


def scaling_environment(settings: Settings, most: int, max_jobs: int | None) -> dict[str, str]:
    """Return the variables by which beat launches workers of this machine, `most` at once.

    The policy that the user has set is kept. Raises GPUFlowError where the file cannot be written.
    """
    if settings.scaling_policy:
        return {"ENABLE_ELASTIC_SCALING": "true"}
    family: dict[str, object] = {
        "name": "local",
        "provisioner": {"kind": "local"},
        "max": most,
        "targetBacklog": 60,
        "launchDeadline": 120,
    }
    if max_jobs is not None:
        family["maxJobs"] = max_jobs
    path = settings.state_dir / "scaling.yaml"
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"schema": 1, "families": [family]}), encoding="utf-8")  # JSON is YAML
        part.replace(path)
    except OSError as error:
        raise GPUFlowError(
            f"{path} cannot be written: {error.strerror or error}; set GPUFLOW_STATE_DIR to a folder of yours"
        ) from None
    return {"ENABLE_ELASTIC_SCALING": "true", "GPUFLOW_SCALING_POLICY": str(path)}


def _own_places(settings: Settings, folder: Path) -> dict[str, str]:
    """Return the variables that open the user's folders and networks to tasks: user and operator are one here."""
    own = [str(path) for path in (folder.absolute(), Path.home()) if str(path).strip("/") and "," not in str(path)]
    return {
        "GPUFLOW_READ_ROOTS": ",".join(dict.fromkeys((*settings.read_roots, *own))),
        "GPUFLOW_WRITE_ROOTS": ",".join(dict.fromkeys((*settings.write_roots, *own))),
        "GPUFLOW_ALLOW_HOSTS": ",".join(dict.fromkeys((*settings.allow_hosts, *LOCAL_NETWORKS))),
    }


def with_our_packages(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a Python that must find our packages, also where they are not installed."""
    home = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if home in installed:
        return dict(base)
    return {**base, "PYTHONPATH": os.pathsep.join([str(home), *filter(None, [base.get("PYTHONPATH", "")])])}


def share_gpus(uuids: Sequence[str], workers: int) -> list[str | None]:
    """Return `--gpus` of each of several workers on this machine, so that no two use one GPU.

    One worker, or a machine without GPUs: None for all (everything that is there). A worker for which no GPU is left
    gets an empty list.
    """
    if workers == 1 or not uuids:
        return [None] * workers
    return [",".join(uuids[number::workers]) for number in range(workers)]
