"""The environment of a child process: an allowlist of the worker's, and what gpuflow gives. Pure."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from gpuflow.policy.secrets import NEVER, without_credentials
from gpuflow.spec.references import UnresolvedReference, resolve_env

#: Variables of the worker that a child inherits; globs. Never REDIS_URL; tokens, passwords and the user parts of URLs
#: among them only where GPUFLOW_PASS_ENV names the variable, or the task does so by `secrets`.
ALLOWED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_*",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "HF_*",
    "TRANSFORMERS_*",
    "*_PROXY",
    "*_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "PIP_*",
    "CUDA_HOME",
    "NVIDIA_*",
    "NCCL_*",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TORCH_*",
    "PYTORCH_*",
    "WANDB_*",
    "MLFLOW_*",
    "VLLM_*",
    "GPUFLOW_CACHE_DIR",
)
#: Never passed on, whatever GPUFLOW_PASS_ENV says.
FORBIDDEN: Final = NEVER
#: Those of ALLOWED that may hold credentials: what a local cluster passes on whole, as its user is its operator.
WITH_CREDENTIALS: Final = ("HF_*", "TRANSFORMERS_*", "*_PROXY", "*_proxy", "PIP_*", "WANDB_*", "MLFLOW_*", "VLLM_*")
#: What keeps libraries from the network; `GPUFLOW_OFFLINE` is for our own downloads.
OFFLINE: Final[Mapping[str, str]] = {
    "GPUFLOW_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PIP_NO_INDEX": "1",
}
#: The token of the Hugging Face hub, and what keeps its library from the one that `hf auth login` has left in the home.
HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105  (its name)
NO_HUB_LOGIN: Final[Mapping[str, str]] = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def child_environment(
    worker: Mapping[str, str],
    *,
    pass_env: Sequence[str] = (),
    given: Mapping[str, str],
    requested: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    offline: bool = False,
    hub_login: bool = False,
) -> dict[str, str]:
    """Return the environment of a child.

    `worker` is the worker's own, `pass_env` further names or globs, `requested` the `env:` of the template, `secrets`
    the values of its `secrets:`, and `given` what gpuflow sets; each later one wins, and nothing forbidden comes in
    from the first three. A requested value with `${env:NAME}` is left out: the child puts it together itself.

    The login of the worker's user at the hub (`hf auth login`, a file in the home) is for a child whose task names a
    token of the hub, for all where `pass_env` names it, and with `hub_login`, for what the user runs here directly.
    """
    mine = {name: value for name, value in worker.items() if not is_forbidden(name)}
    allowed = without_credentials({name: value for name, value in mine.items() if _matches(name, ALLOWED)})
    allowed |= {name: value for name, value in mine.items() if _matches(name, pass_env)}
    asked = {
        name: str(value)
        for name, value in (requested or {}).items()
        if not is_forbidden(name) and "${env:" not in str(value)
    }
    found = {**allowed, **asked, **(secrets or {}), **(OFFLINE if offline else {}), **given}
    if not hub_login and not _matches(HUB_TOKEN, pass_env) and not _has_hub_token(found, requested or {}):
        found |= NO_HUB_LOGIN
    return found


def _has_hub_token(found: Mapping[str, str], requested: Mapping[str, Any]) -> bool:
    """Say whether a child has a token in its environment, put together by itself or not; an empty one is none."""
    values = dict(found)
    for name, value in requested.items():
        if "${env:" in str(value):
            with contextlib.suppress(UnresolvedReference):
                values[name] = resolve_env(str(value), values)
    return bool(values.get(HUB_TOKEN, "").strip())


def is_forbidden(name: str) -> bool:
    """Say whether a variable of the worker is given to no child, by whatever way."""
    return _matches(name, FORBIDDEN)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return _any_of(tuple(patterns)).match(name) is not None


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # One expression: each child of a worker has every variable of that worker compared with all of them.
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or "(?!)")


def given_variables(
    *,
    task_id: str,
    attempt: int,
    gpus: Sequence[str],
    output_dir: Path,
    checkpoint_dir: Path,
    resume_from: str | None,
    model: Mapping[str, Any] | None,
    results_dir: Path,
    python_path: str | None,
    notice_seconds: float | None = None,
    executors: Sequence[str] = (),
    cpus: float | None = None,
) -> dict[str, str]:
    """Return the variables that every executor may rely on (docs/reference/events.md).

    `notice_seconds` is the time from a notice (SIGUSR1) to SIGTERM, `executors` the setting of that name, `cpus` what
    the task has declared.
    """
    source = (model or {}).get("source") or {}
    variables = {
        "TASK_ID": task_id,
        "ATTEMPT": str(attempt),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "GPU_DEVICE": ",".join(gpus),
        "RESULTS_DIR": str(results_dir),
        "OUTPUT_DIR": str(output_dir),
        "CHECKPOINT_DIR": str(checkpoint_dir),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if resume_from:
        variables["RESUME_FROM"] = resume_from
    if notice_seconds is not None:
        variables["NOTICE_SECONDS"] = f"{notice_seconds:g}"
    if source.get("identifier"):
        variables["MODEL_NAME"] = str(source["identifier"])
        if source.get("type") == "local":
            variables["MODEL_PATH"] = str(source["identifier"])
    if cpus:
        variables["GPUFLOW_CPUS"] = f"{cpus:g}"
    if executors:
        variables["GPUFLOW_EXECUTORS"] = ",".join(executors)
    if python_path:
        variables["PYTHONPATH"] = python_path
    return variables


@cache
def python_path() -> str | None:
    """Return the folder of our packages when they are not installed, so that the child finds them too."""
    home = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if home in installed else str(home)
