"""The messages of merged calls: that of a run, made from the message of a caller, and a caller's own for
gpuflow.control.

A caller's message holds all that makes it a Celery task: id, group, chord, links, stamps. A run has none of that; it is
found by its header.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

from kombu.utils.json import dumps

#: Header of a run's message: it executes the calls that wait for it in Redis.
RUN_HEADER: Final = "gpuflow_run"
#: Priority of callers in the control queue: thousands of them may come at once, and pipelines are not to wait for them.
CALLER_PRIORITY: Final = 3
#: What a message consists of; what else stands at the top of it are the hints of a demand queue.
_PARTS: Final = frozenset({"body", "content-encoding", "content-type", "headers", "properties"})
#: Headers that tie a message to other tasks of its sender, or limit it.
_OF_THE_CALLER: Final[Mapping[str, Any]] = {
    "eta": None,
    "expires": None,
    "group": None,
    "group_index": None,
    "parent_id": None,
    "replaced_task_nesting": 0,
    "retries": 0,
    "shadow": None,
    "stamped_headers": None,
    "stamps": {},
    "timelimit": [None, None],
}


def run_message(caller: Mapping[str, Any], run_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of a run of the same Celery task as a caller's message, with keyword arguments of its own."""
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    headers = {
        **caller["headers"],
        **_OF_THE_CALLER,
        "id": run_id,
        "root_id": run_id,
        "ignore_result": True,
        RUN_HEADER: 1,
    }
    properties = {**caller["properties"], "correlation_id": run_id, "delivery_tag": str(uuid.uuid4()), "reply_to": ""}
    return {
        **{name: part for name, part in caller.items() if name in _PARTS},
        "body": _encoded([[], dict(kwargs), embed]),
        "headers": headers,
        "properties": properties,
    }


def control_message(caller: Mapping[str, Any], queue: str) -> dict[str, Any]:
    """Return a caller's message as it goes to the control queue, under a delivery tag of its own."""
    properties = dict(caller["properties"])
    properties["delivery_info"] = {**(properties.get("delivery_info") or {}), "exchange": "", "routing_key": queue}
    properties["delivery_tag"] = str(uuid.uuid4())
    return {**{name: part for name, part in caller.items() if name in _PARTS}, "properties": properties}


def read_message(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stored message, and the hints that stand before it. Raises ValueError for one that is none."""
    whole = json.loads(text)
    message = {name: part for name, part in whole.items() if name in _PARTS}
    hints = {name: part for name, part in whole.items() if name not in _PARTS and name != "at"}
    return message, hints


def arguments(message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return args, kwargs and what is embedded of a message's body."""
    args, kwargs, embed = json.loads(base64.b64decode(message["body"]))
    return args, kwargs, embed or {}


def hints_text(hints: Mapping[str, Any]) -> str:
    """Return hints as they stand at the front of a message (broker/lua/common.lua)."""
    return json.dumps(hints)[1:-1] + ", " if hints else ""


def _encoded(body: Any) -> str:
    return base64.b64encode(dumps(body).encode()).decode()


__all__ = ["CALLER_PRIORITY", "RUN_HEADER", "arguments", "control_message", "hints_text", "read_message", "run_message"]
