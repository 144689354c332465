"""Refuses secrets that a template holds as plain text: its record and its message would show them to all of Redis.

Called by `checking`, while a template is read; not at dispatch, when references have their values. What looks like a
secret is decided by `gpuflow.secrets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuflow.secrets import written_secrets
from gpuflow.spec.env_names import problem_of
from gpuflow.spec.report import Findings, Path

_WHAT: Final = {
    "header": "is a header that looks like a secret",
    "variable": "is a variable that looks like a secret",
    "field": "looks like a secret",
    "url": "holds a user or a password",
}
_NAMED: Final = "name it in `secrets` and give its value to the workers"


def check_plain_secrets(spec: Mapping[str, Any], findings: Findings, *, foreign: bool) -> None:
    """Note a mistake for each secret in plain text; a warning in a template of flowmesh/v1 or mloc/v1 (`foreign`).

    A variable that no task may set is left to the check of its name.
    """
    note = findings.warn if foreign else findings.add
    for path, kind in written_secrets(spec):
        if kind == "variable" and problem_of(str(path[-1])):
            continue
        note(path, f"{_WHAT[kind]}, and plain text stays readable in Redis; {_mend(path, kind)}")


def _mend(path: Path, kind: str) -> str:
    if path[0] == "function":
        return "set it in the environment of the workers, where the function reads it"
    if path[:2] == ("output", "destination"):
        if kind == "url":
            return "the address stands in every result: leave it out, and give a token by headers.Authorization"
        return f"{_NAMED}, and write ${{env:NAME}} here; the fleet's own gateway needs none"
    if kind == "variable":
        return f"write secrets: [{path[-1]}] in its place, and give its value to the workers"
    return f"{_NAMED}, and write ${{env:NAME}} here"
