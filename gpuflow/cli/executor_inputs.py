"""Brings what a request of `gpuflow executor run` reads to this machine, as a worker does before its child."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpuflow.artifacts.inputs import localize
from gpuflow.errors import InvalidTemplate
from gpuflow.merge.specs import MERGED
from gpuflow.protocol import Request
from gpuflow.settings import Settings
from gpuflow.spec import canonical
from gpuflow.worker.containers.local import local_container
from gpuflow.worker.merged_inputs import gather
from gpuflow.worker.secret_sources import reference_values

#: Who lacks a secret, in the error of a caller of a merged request.
_HERE: Final = "here"


def localized(request: Request, settings: Settings) -> Request:
    """Return the request with local inputs: the folder of `checkpoint.load`, adapters, data files, references.

    A request that has a `checkpoint_path` keeps it. Raises GPUFlowError, OSError.
    """
    spec = dict(request.spec)
    entries = spec.pop(MERGED, None)
    secrets = {name: os.environ[name] for name in spec.get("secrets") or () if name in os.environ}
    wanted = {name: part for name, part in spec.items() if name != "checkpoint" or request.checkpoint_path is None}
    values = reference_values(spec, secrets, settings)
    inputs = localize(wanted, settings=settings, environment=values)
    whole = local_container({**spec, **inputs.spec}, settings)
    if isinstance(entries, list):
        good = [entry if _is_good(spec, entry) else None for entry in entries]
        gathered = gather({**spec, MERGED: good}, secrets, settings, _HERE)
        whole |= {"env": gathered.env, "secrets": sorted(gathered.secrets)}
        whole[MERGED] = [local or given for local, given in zip(gathered.children, entries, strict=True)]
    elif entries is not None:
        whole[MERGED] = entries
    return replace(request, spec=whole, checkpoint_path=request.checkpoint_path or inputs.checkpoint_path)


def _is_good(common: Mapping[str, Any], entry: Any) -> bool:
    """Say whether the inputs of a caller can be looked at; one with mistakes is the child's to refuse."""
    own = entry.get("spec") if isinstance(entry, Mapping) else None
    try:
        return isinstance(own, Mapping) and bool(canonical({**common, **own}))
    except InvalidTemplate:
        return False
