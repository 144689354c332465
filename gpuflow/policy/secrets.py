"""Decides which secrets of a worker a task may have, and which variables its child inherits. Pure.

A task may name the files of GPUFLOW_SECRETS_DIR and the variables that the operator has meant for tasks: one that is
called GPUFLOW_SECRET_NAME is the secret NAME. Any other variable of the worker is its own, unless GPUFLOW_ALLOW_SECRETS
names it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from gpuflow.policy.refusal import Refusal
from gpuflow.secrets import is_secret_variable

#: The setting with globs of variables that tasks may name.
SETTING: Final = "GPUFLOW_ALLOW_SECRETS"
#: A variable of the worker that begins so is a secret for tasks, under the rest of its name.
PREFIX: Final = "GPUFLOW_SECRET_"
#: Variables that no worker gives to any task, whatever its settings say; globs.
NEVER: Final = (
    *("REDIS_URL", "GPUFLOW_*TOKEN*", f"{PREFIX}*", "CELERY_*", "CUDA_VISIBLE_DEVICES", "OTEL_EXPORTER_*HEADERS"),
)
#: `user:password@` of a URL.
_USER_OF_URL: Final = re.compile(r"(?<=://)[^\s/?#]*@")
#: That of a proxy, whose address may stand without a scheme and has no path.
_USER_OF_PROXY: Final = re.compile(r"(?:(?<=://)|(?<![^\s,]))(?:(?!://)\S)*@")


def is_never(name: str) -> bool:
    """Say whether a variable is kept from whatever a task starts: an address of the broker, a token."""
    return name != "CUDA_VISIBLE_DEVICES" and is_allowed(name, NEVER)


def is_allowed(name: str, patterns: Sequence[str]) -> bool:
    """Say whether the setting lets tasks have the worker's variable `name`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def variable_of(name: str, variables: Mapping[str, str], patterns: Sequence[str]) -> str | None:
    """Return the variable of the worker that holds the secret `name` for tasks; None where none does."""
    if variables.get(PREFIX + name):
        return PREFIX + name
    return name if variables.get(name) and is_allowed(name, patterns) else None


def offered(variables: Mapping[str, str], patterns: Sequence[str], files: Collection[str]) -> frozenset[str]:
    """Return the names of all secrets that a worker gives tasks; `files` are those of GPUFLOW_SECRETS_DIR."""
    own = {name.removeprefix(PREFIX) for name, value in variables.items() if value and name.startswith(PREFIX)}
    return frozenset(
        {*own, *files, *(name for name, value in variables.items() if value and is_allowed(name, patterns))}
    )


def refusal(
    name: str, *, variables: Mapping[str, str], patterns: Sequence[str], files: Collection[str]
) -> Refusal | None:
    """Return why tasks may not have the secret `name`; None where they may, and where this worker has none of it.

    `files` are the names of those that GPUFLOW_SECRETS_DIR holds.
    """
    if variable_of(name, variables, patterns) is not None or name in files or not variables.get(name):
        return None
    return Refusal(
        path="secrets",
        setting=SETTING,
        message=(
            f"secrets: {name} is a variable of this worker that it gives to no task; start the worker with "
            f"{PREFIX}{name}, put a file {name} into its GPUFLOW_SECRETS_DIR, or set {SETTING}={name} on it"
        ),
    )


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a child that named no secret: no tokens and passwords, and URLs without their user parts."""
    return {name: _without_user(name, value) for name, value in variables.items() if not is_secret_variable(name)}


def _without_user(name: str, value: str) -> str:
    """Return the value of a variable whose URLs, however many and however separated, have no user parts.

    A password may hold a comma: where it is unclear what is a list, an entry is lost rather than half a password shown.
    """
    if "@" not in value:
        return value
    return (_USER_OF_PROXY if name.lower().endswith("_proxy") else _USER_OF_URL).sub("", value)
