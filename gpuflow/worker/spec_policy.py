"""What this worker allows tasks: asked for each attempt before anything is fetched, and again for what was loaded.

The rules are those of `gpuflow.policy`, which is pure; here they get the worker's settings. A further rule is one more
function in `checks_of`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuflow.errors import NotAllowed
from gpuflow.merge.specs import MERGED
from gpuflow.policy import code, engine_traces, secrets
from gpuflow.policy.refusal import Refusal
from gpuflow.settings import Settings
from gpuflow.worker.child_environment import WITH_CREDENTIALS

#: Says why a spec is refused, or None. The spec is of one task; nothing is taken for granted of its form.
Check = Callable[[Mapping[str, Any]], Refusal | None]


@dataclass(frozen=True, kw_only=True)
class SpecPolicy:
    """All checks of one worker, in the order in which they are asked."""

    worker: str
    checks: tuple[Check, ...] = ()

    def refusal(self, spec: Mapping[str, Any]) -> Refusal | None:
        """Return the first refusal of a spec; of one with merged calls, that of what they share."""
        alone = {name: value for name, value in spec.items() if name != MERGED}
        return next((found for check in self.checks if (found := check(alone)) is not None), None)

    def ask(self, spec: Mapping[str, Any]) -> None:
        """Raise NotAllowed for a spec that is refused."""
        found = self.refusal(spec)
        if found is not None:
            raise NotAllowed(f"worker {self.worker} does not run this: {found.message}", found.setting)


def as_operator(settings: Settings) -> Settings:
    """Return the settings of a worker whose submitters are its operator: all is open that was not set expressly."""
    opened: dict[str, Any] = {}
    if not settings.is_set("allow_code"):
        opened["allow_code"] = (code.ALL,)
    if not settings.is_set("gateway_functions"):
        opened["gateway_functions"] = ("*",)
    if not settings.is_set("allow_secrets"):
        opened["allow_secrets"] = ("*",)
        opened["pass_env"] = (*settings.pass_env, *WITH_CREDENTIALS)
    if not settings.is_set("allow_buckets"):
        opened["allow_buckets"] = ("*",)
    return settings.model_copy(update=opened)


def policy_of(settings: Settings, worker: str) -> SpecPolicy:
    """Return the policy of a worker with these settings."""
    return SpecPolicy(worker=worker, checks=checks_of(settings))


def checks_of(settings: Settings) -> tuple[Check, ...]:
    """Return the checks that these settings make."""
    return (_code(settings), _secrets(settings), engine_traces.refusal)


def _code(settings: Settings) -> Check:
    allowed = code.allowed_kinds(settings.allow_code)
    return lambda spec: code.refusal(spec, allowed)


def _secrets(settings: Settings) -> Check:
    def check(spec: Mapping[str, Any]) -> Refusal | None:
        for name in _names(spec.get("secrets")):
            files = {name} if _is_file(settings.secrets_dir, name) else set()
            found = secrets.refusal(name, variables=os.environ, patterns=settings.allow_secrets, files=files)
            if found is not None:
                return found
        return None

    return check


def _names(named: Any) -> list[str]:
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []


def _is_file(folder: Path | None, name: str) -> bool:
    return folder is not None and "/" not in name and "\0" not in name and (folder / name).is_file()
