"""Which classes of workers serve which demand queues, by what their entries say. Pure.

For people, and to know whether another worker could take a task. A worker decides for itself
(`worker.queue_matcher`), and tells the broker of those queues alone that it was woken for or took from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuflow.errors import GPUFlowError
from gpuflow.routing.capability import CAPABILITY_SCHEMA, Capability
from gpuflow.routing.fit import match
from gpuflow.routing.queue_names import family_matches
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.requirement import Requirement

if TYPE_CHECKING:
    from gpuflow.fleet.registry import WorkerEntry


def serving_classes(entries: Iterable[WorkerEntry], asks: Mapping[str, str | None]) -> dict[str, set[str]]:
    """Return, for each queue, the classes that serve it; `asks` are the stored requirements as JSON, if there are."""
    examples = {entry.class_name: entry for entry in entries if entry.class_name and entry.capability}
    found: dict[str, set[str]] = {queue: set() for queue in asks}
    wanted = {queue: asked for queue, raw in asks.items() if (asked := _requirement(queue, raw)) is not None}
    for name, entry in examples.items():
        capability = Capability.from_dict({**entry.capability, "schema": CAPABILITY_SCHEMA})
        families = entry.load.get("families")
        for queue, asked in wanted.items():
            covered = families is None or any(family_matches(queue, str(family)) for family in families)
            if covered and match(asked, capability).fits:
                found[queue].add(name)
    return found


def _requirement(queue: str, raw: str | None) -> Requirement | None:
    if not raw:
        return requirement_of(queue)
    try:
        return Requirement.from_dict(json.loads(raw))
    except (GPUFlowError, ValueError, TypeError):
        return None
