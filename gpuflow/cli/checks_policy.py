"""Checks of `gpuflow doctor` of the policy: what a worker with these settings allows tasks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuflow.policy.code import KINDS, allowed_kinds
from gpuflow.policy.secrets import PREFIX
from gpuflow.settings import Settings
from gpuflow.worker.secret_sources import offered_secrets

if TYPE_CHECKING:
    from gpuflow.cli.checks import Check


def policy_checks(settings: Settings) -> list[Check]:
    """Say what is open: code that tasks may bring, secrets that they may name, places that they may use.

    What the operator chose is no fault.
    """
    return [_code(settings), _secrets(settings), _folders(settings), _hosts(settings)]


def _code(settings: Settings) -> Check:
    from gpuflow.cli.checks import Check

    kinds = sorted(allowed_kinds(settings.allow_code))
    images = f"; images {', '.join(settings.container_images)} (GPUFLOW_CONTAINER_IMAGES)"
    said = "all kinds: whoever submits runs code as the worker's user" if len(kinds) == len(KINDS) else ", ".join(kinds)
    detail = f"tasks may bring {said or 'none'} (GPUFLOW_ALLOW_CODE){images if settings.container_images else ''}"
    functions = f"; functions {', '.join(settings.gateway_functions)} over HTTP (GPUFLOW_GATEWAY_FUNCTIONS)"
    return Check(name="code of tasks", status="ok", detail=detail + (functions if settings.gateway_functions else ""))


def _secrets(settings: Settings) -> Check:
    from gpuflow.cli.checks import Check

    own = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    parts = [f"variables {', '.join(settings.allow_secrets)} (GPUFLOW_ALLOW_SECRETS)"] if settings.allow_secrets else []
    parts += [f"{', '.join(own)} ({PREFIX}*)"] if own else []
    parts += [f"the files of {settings.secrets_dir} (GPUFLOW_SECRETS_DIR)"] if settings.secrets_dir else []
    passed = f"; every child gets {', '.join(settings.pass_env)} (GPUFLOW_PASS_ENV)" if settings.pass_env else ""
    names = offered_secrets(settings)
    now = f", which are now {', '.join(names)}" if names else ", of which there is none now" if parts else ""
    detail = f"tasks may name {', '.join(parts) or 'none'}{now}{passed}"
    return Check(name="secrets of tasks", status="ok", detail=detail)


def _folders(settings: Settings) -> Check:
    from gpuflow.cli.checks import Check

    read, write = (", ".join(roots) or "none" for roots in (settings.read_roots, settings.write_roots))
    detail = f"beside results and cache tasks may read {read} (GPUFLOW_READ_ROOTS), write {write} (GPUFLOW_WRITE_ROOTS)"
    return Check(name="folders of tasks", status="ok", detail=detail)


def _hosts(settings: Settings) -> Check:
    from gpuflow.cli.checks import Check

    hosts = ", ".join(settings.allow_hosts) or "none"
    detail = f"of this machine and private networks tasks may reach {hosts} (GPUFLOW_ALLOW_HOSTS)"
    return Check(name="hosts of tasks", status="ok", detail=detail)
