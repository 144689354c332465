"""What the callers of a merged request need before its child starts: each has inputs, secrets and variables of its own.

Called by `worker.preparation`. One process serves them all, so their secrets and variables are put together; a caller
whose part cannot be had, or contradicts that of another, fails alone: its entry then holds the error in place of a spec
(`executors.merging`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.artifacts.inputs import localize
from gpuflow.errors import GPUFlowError
from gpuflow.merge.specs import MERGED
from gpuflow.settings import Settings
from gpuflow.spec.env_names import first_problem
from gpuflow.worker.outcome import cause_of
from gpuflow.worker.secret_sources import reference_values, secrets_of
from gpuflow.worker.spec_policy import SpecPolicy

#: Sections that become part of the one process, not of a caller's spec.
_OF_THE_PROCESS: Final = frozenset({"env", "secrets", "notify"})


class Contradiction(GPUFlowError):
    """Two callers of a merged request want one variable with different values."""


class RefusedVariable(GPUFlowError):
    """A task sets a variable that no task may set."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The section with local inputs, and the variables and secrets of all callers that can be served."""

    children: list[dict[str, Any]]
    env: dict[str, str]
    secrets: dict[str, str]


def refuse_variables(env: Any) -> None:
    """Raise RefusedVariable for variables that no task may set: a spec may come straight from the broker."""
    if not isinstance(env, Mapping):
        raise RefusedVariable("env must be a mapping of names to values")
    if problem := first_problem(env):
        raise RefusedVariable(f"env: {problem}")


def specs_of(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spec of each caller of a merged request, as the child will lay it over the common one."""
    common = {name: value for name, value in spec.items() if name != MERGED}
    for entry in spec.get(MERGED) or ():
        own = entry.get("spec") if isinstance(entry, Mapping) else None
        if isinstance(own, Mapping):
            yield {**common, **own}


def gather(
    spec: Mapping[str, Any],
    secrets: Mapping[str, str],
    settings: Settings,
    worker_id: str,
    policy: SpecPolicy | None = None,
) -> Gathered:
    """Bring to this machine what the callers of a merged request read; `secrets` are those of the request itself.

    `policy` is asked for each of them (None: whoever asks is the operator).

    An entry that is none, or has no spec, stays as it is: the child refuses it. Nothing is raised for one caller.
    """
    gathered = Gathered(children=[], env=dict(spec.get("env") or {}), secrets=dict(secrets))
    for entry in spec[MERGED]:
        own = entry.get("spec") if isinstance(entry, Mapping) else None
        if not isinstance(own, Mapping):
            gathered.children.append(entry)
            continue
        try:
            gathered.children.append({**entry, **_localized(spec, own, gathered, settings, worker_id, policy)})
        except (OSError, GPUFlowError) as error:
            gathered.children.append({"id": entry.get("id"), "error": cause_of(error)})
    return gathered


def _localized(
    spec: Mapping[str, Any],
    own: Mapping[str, Any],
    gathered: Gathered,
    settings: Settings,
    worker_id: str,
    policy: SpecPolicy | None,
) -> dict[str, Any]:
    """Return what replaces a caller's spec, and note its variables and secrets once all of it is there."""
    given = own.get("env") or {}
    refuse_variables(given)
    env = {str(name): str(value) for name, value in given.items()}
    if policy is not None:
        policy.ask({**spec, **own})
    contradicted = [name for name, value in env.items() if gathered.env.get(name, value) != value]
    if contradicted:
        raise Contradiction(
            f"env.{contradicted[0]} has another value in a call that this one was merged with; "
            "write merge: never, or the same value"
        )
    secrets = secrets_of(own, settings, worker_id)
    whole = {**spec, **own, "env": {**gathered.env, **env}}
    values = reference_values(whole, {**gathered.secrets, **secrets}, settings)
    inputs = localize(
        {name: value for name, value in own.items() if name not in _OF_THE_PROCESS},
        settings=settings,
        environment=values,
    )
    if policy is not None:
        policy.ask({**spec, **inputs.spec})
    gathered.env.update(env)
    gathered.secrets.update(secrets)
    local: dict[str, Any] = {"spec": inputs.spec}
    return local if inputs.checkpoint_path is None else {**local, "checkpoint_path": inputs.checkpoint_path}
