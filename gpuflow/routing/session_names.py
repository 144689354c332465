"""Which session can answer a task: tasks of one name can be answered by one engine. Pure.

A message carries the name as a hint (`routing.affinity`), so that a worker takes tasks of its warm models even where it
has no GPU left. Everything that an engine is loaded with counts; what each request may choose anew does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Task types that sessions answer.
SESSION_TYPES: Final = frozenset({"inference", "embedding"})
#: Parts of `model` that a request brings along.
_OF_REQUEST: Final = frozenset({"adapters"})
_DIGITS: Final = 16


def session_name(spec: Mapping[str, Any], asks: Sequence[str] = ()) -> str:
    """Return the name of the sessions that can answer a canonical spec; "" for one that needs a child of its own.

    `asks` are the queues of what it asks for: a session has the GPUs that one of them names.
    Only whether there are adapters counts: which ones is each request's own. `checkpoint.load` may name whole weights,
    so it counts as it is. Secrets count by their names here, by their values where the session is (`Sessions.open`).
    """
    task_type, model = str(spec.get("taskType")), spec.get("model")
    if task_type not in SESSION_TYPES or not isinstance(model, Mapping) or not isinstance(model.get("source"), Mapping):
        return ""
    loaded = {name: value for name, value in model.items() if name not in _OF_REQUEST}
    parts = [
        task_type,
        spec.get("engine"),
        spec.get("environment"),
        loaded,
        bool(model.get("adapters")),
        (spec.get("checkpoint") or {}).get("load"),
        spec.get("env"),
        spec.get("secrets"),
        sorted(asks),
    ]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
