"""From what a user asks to be served to the model that is: what is not said is filled in once, for all its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.seen_fleet import SeenFleet
from gpuflow.serving.models import ServedModel, served_spec
from gpuflow.serving.store import ServedModels


def model_of(app: GPUFlow, parts: Mapping[str, Any], *, name: str, replicas: int | None, owner: str) -> ServedModel:
    """Return the model to be served.

    Without `replicas` there are as many as before, or one. Without resources it asks for what it asked for before, else
    for any GPU if the fleet has one now, else for CPUs. Raises InvalidTemplate, redis errors.
    """
    there = ServedModels(app.redis, app.keys, app.signer).find(name)
    resources = parts.get("resources") or (there.spec.get("resources") if there is not None else None)
    if not resources:
        resources = {"hardware": {"gpu": {"count": 1 if SeenFleet(app.redis, app.keys).has_gpu() else 0}}}
    return ServedModel(
        name=name,
        spec=served_spec({**parts, "resources": resources}, owner=owner),
        replicas=replicas if replicas is not None else there.replicas if there is not None else 1,
        owner=owner,
    )
