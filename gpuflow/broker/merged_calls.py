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

from celery.app.task import Context
from kombu.utils.json import dumps

#: Header of a run's message: it executes the calls that wait for it in Redis.
RUN_HEADER: Final = "gpuflow_run"
#: Header of a message of a team's own task that has a record: it was merged, or it is a run.
RECORDED_HEADER: Final = "gpuflow_recorded"
#: Header of a caller's message in the control queue: it comes for the end of its call, and begins nothing.
FETCH_HEADER: Final = "gpuflow_fetch"
#: Priority of callers in the control queue: thousands of them may come at once, and pipelines are not to wait for them.
CALLER_PRIORITY: Final = 3
#: What a message consists of; what else stands at the top of it are the hints of a demand queue.
_PARTS: Final = frozenset({"body", "content-encoding", "content-type", "headers", "properties"})
#: What the body of a message embeds beside its arguments: the tasks that follow on it.
_EMBEDDED: Final = ("callbacks", "errbacks", "chain", "chord")
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


def run_message(caller: Mapping[str, Any], run_id: str, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the message of a run of the same Celery task as a caller's message.

    `kwargs` are keyword arguments of its own in place of all arguments; None: those of the caller.
    """
    arguments_of_caller = arguments(caller)[:2] if kwargs is None else ([], dict(kwargs))
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    own = {"id": run_id, "root_id": run_id, "ignore_result": True, RUN_HEADER: 1}
    properties = {**caller["properties"], "correlation_id": run_id, "delivery_tag": str(uuid.uuid4()), "reply_to": ""}
    return {
        **{name: part for name, part in caller.items() if name in _PARTS},
        "body": _encoded([*arguments_of_caller, embed]),
        "headers": {**caller["headers"], **_OF_THE_CALLER, **own},
        "properties": properties,
    }


def control_message(caller: Mapping[str, Any], queue: str) -> dict[str, Any]:
    """Return a caller's message as it goes to the control queue, under a delivery tag of its own.

    The caller may be queued again by hand meanwhile, and its message waits in its own queue then.
    """
    properties = dict(caller["properties"])
    properties["delivery_info"] = {**(properties.get("delivery_info") or {}), "exchange": "", "routing_key": queue}
    properties["delivery_tag"] = str(uuid.uuid4())
    return {
        **{name: part for name, part in caller.items() if name in _PARTS},
        "headers": {**caller["headers"], FETCH_HEADER: 1},
        "properties": properties,
    }


def is_readable(message: Mapping[str, Any]) -> bool:
    """Whether the body of a message can be read, and one like it be written: plain JSON, as gpuflow's own calls are."""
    properties, headers = message.get("properties") or {}, message.get("headers") or {}
    is_json = message.get("content-type") == "application/json" and not headers.get("compression")
    return is_json and properties.get("body_encoding") == "base64"


def read_message(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stored message, and the hints that stand before it. Raises ValueError for one that is none."""
    try:
        whole = json.loads(text)
    except RecursionError:
        raise ValueError("the message nests too deep") from None
    if not isinstance(whole, dict):
        raise ValueError("the message is not a JSON object")
    message = {name: part for name, part in whole.items() if name in _PARTS}
    properties = message.get("properties")
    if not isinstance(message.get("headers"), dict) or not isinstance(properties, dict):
        raise ValueError("the message lacks headers or properties")
    if not isinstance(properties.get("delivery_info") or {}, dict):
        raise ValueError("the delivery_info of the message is not a mapping")
    hints = {name: part for name, part in whole.items() if name not in _PARTS and name != "at"}
    return message, hints


def arguments(message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return args, kwargs and what is embedded of a message's body. Raises ValueError for a body that is none."""
    body = message.get("body")
    if not isinstance(body, str):
        raise ValueError("the message has no body")
    try:
        found = json.loads(base64.b64decode(body))
    except RecursionError:
        raise ValueError("the body of the message nests too deep") from None
    if not isinstance(found, list) or len(found) != 3 or not isinstance(found[0], list | tuple):
        raise ValueError("the body of the message is not arguments, keywords and what is embedded")
    args, kwargs, embed = found[0], found[1], found[2] or {}
    if not isinstance(kwargs, dict) or not isinstance(embed, dict):
        raise ValueError("the body of the message holds keywords or callbacks that are not a mapping")
    return list(args), kwargs, {name: embed[name] for name in _EMBEDDED if name in embed}


def request_of(message: Mapping[str, Any]) -> Context:
    """Return the request that Celery would make of a message. Raises ValueError for a body that is none."""
    args, kwargs, embed = arguments(message)
    return Context(message["headers"], args=args, kwargs=kwargs, **embed)


def hints_text(hints: Mapping[str, Any]) -> str:
    """Return hints as they stand at the front of a message (broker/lua/common.lua)."""
    return json.dumps(hints)[1:-1] + ", " if hints else ""


def _encoded(body: Any) -> str:
    return base64.b64encode(dumps(body).encode()).decode()


__all__ = [
    "CALLER_PRIORITY",
    "FETCH_HEADER",
    "RECORDED_HEADER",
    "RUN_HEADER",
    "arguments",
    "control_message",
    "hints_text",
    "is_readable",
    "read_message",
    "request_of",
    "run_message",
]
