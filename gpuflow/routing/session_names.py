"""Which session can answer a task: tasks of one name can be answered by one engine. Pure.

A message carries the name as a hint (`routing.affinity`), so that a worker takes tasks of its warm models even where it
has no GPU left. Everything that an engine is loaded with counts; what each request may choose anew does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Task types whose model a session keeps loaded. `container` is apart: a session answers a task with a request.
SESSION_TYPES: Final = frozenset({"inference", "embedding"})
#: Parts of `model` that a request brings along.
_OF_REQUEST: Final = frozenset({"adapters"})
#: The same of `container`.
_OF_CONTAINER_REQUEST: Final = frozenset({"request", "metrics"})
_DIGITS: Final = 16


def session_name(spec: Mapping[str, Any], asks: Sequence[str] = ()) -> str:
    """Return the name of the sessions that can answer a canonical spec; "" for one that needs a child of its own.

    `asks` are the queues of what it asks for: a session has the GPUs that one of them names.
    Only whether there are adapters counts: which ones is each request's own. `checkpoint.load` may name whole weights,
    so it counts as it is. Secrets count by their names here, by their values where the session is (`Sessions.ask`).
    """
    task_type, model = str(spec.get("taskType")), spec.get("model")
    if task_type == "container":
        return _container_name(spec, asks)
    if task_type not in SESSION_TYPES or not isinstance(model, Mapping) or not isinstance(model.get("source"), Mapping):
        return ""
    loaded = {name: value for name, value in model.items() if name not in _OF_REQUEST}
    parts = [
        task_type,
        spec.get("engine"),
        spec.get("environment"),
        loaded,
        bool(model.get("adapters")),
        _field(spec.get("checkpoint"), "load"),
        spec.get("env"),
        spec.get("secrets"),
        sorted(asks),
    ]
    return _digest(parts)


def function_session_name(warm_name: str, asks: Sequence[str]) -> str:
    """Return the name of the sessions that keep a team's function warm; `warm_name` is what its calls share."""
    return _digest(["function", warm_name, sorted(asks)])


def _container_name(spec: Mapping[str, Any], asks: Sequence[str]) -> str:
    """Return the name for a request to a container: everything but the request itself counts."""
    section = spec.get("container")
    if not isinstance(section, Mapping) or section.get("request") is None:
        return ""
    started = {name: value for name, value in section.items() if name not in _OF_CONTAINER_REQUEST}
    hardware = _field(spec.get("resources"), "hardware")
    parts = ["container", spec.get("environment"), started, spec.get("model"), spec.get("env"), spec.get("secrets")]
    return _digest([*parts, hardware, sorted(asks)])


def _field(section: Any, name: str) -> Any:
    """Return a field of a section; of one that is text still to be replaced, the text."""
    return section.get(name) if isinstance(section, Mapping) else section


def _digest(parts: Sequence[Any]) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
