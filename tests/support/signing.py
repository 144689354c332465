"""A fleet whose workers run signed work alone, and the hand of one who may write to its broker and has no key."""

from __future__ import annotations

import base64
import json
import secrets
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import redis

from gpuflow.broker.signed_messages import SIGNATURE_HEADER
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually

Message = dict[str, Any]


def key_file(folder: Path, *keys: str, name: str = "signing.key") -> Path:
    """Write a key file that only this user may read; without keys, a new one."""
    path = folder / name
    path.write_text("\n".join(keys or (secrets.token_hex(32),)) + "\n")
    path.chmod(0o600)
    return path


def signing_env(path: Path, mode: str = "require") -> dict[str, str]:
    return {"GPUFLOW_SIGNING": mode, "GPUFLOW_SIGNING_KEY_FILE": str(path)}


def waiting(client: Any, queue: str) -> list[Message]:
    """Return the messages that wait in a queue, parsed."""
    return [json.loads(raw) for raw in client.lrange(queue, 0, -1)]


def body(*args: Any, embed: Mapping[str, Any] | None = None, **kwargs: Any) -> str:
    """Return the body of a Celery message."""
    return base64.b64encode(json.dumps([args, kwargs, embed or {}]).encode()).decode()


def body_of(message: Message) -> Any:
    return json.loads(base64.b64decode(message["body"]))


def forged(task: str, content: str, *, task_id: str = "", queue: str = "tasks", **headers: Any) -> Message:
    """Return a message as Celery writes one, without a signature."""
    task_id = task_id or str(uuid.uuid4())
    return {
        "body": content,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py", "task": task, "id": task_id, "shadow": None, "eta": None, "expires": None, "group": None,
            "group_index": None, "retries": 0, "timelimit": [None, None], "root_id": task_id, "parent_id": None,
            "argsrepr": "()", "kwargsrepr": "{}", "origin": "evil@host", "ignore_result": False, "stamps": {},
            "replaced_task_nesting": 0, "stamped_headers": None, **headers,
        },
        "properties": {
            "correlation_id": task_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 5,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }  # fmt: skip


def with_new_tag(message: Message) -> Message:
    return {**message, "properties": {**message["properties"], "delivery_tag": str(uuid.uuid4())}}


def with_headers(message: Message, **headers: Any) -> Message:
    return {**message, "headers": {**message["headers"], **headers}}


def signature_of(message: Message) -> str:
    return str(message["headers"][SIGNATURE_HEADER])


def push(client: redis.Redis, queue: str, message: Message | str | bytes) -> None:
    """Write a message to a queue as whoever may write there does."""
    raw = message if isinstance(message, str | bytes) else json.dumps(message)
    client.lpush(queue, raw)


def dead(fleet: TestFleet) -> list[dict[str, Any]]:
    """Return what was put aside, the newest first."""
    with redis.Redis.from_url(fleet.broker.url, decode_responses=True, encoding_errors="replace") as client:
        return [json.loads(entry) for entry in client.lrange(fleet.app.keys.unreadable, 0, -1)]


def refused(fleet: TestFleet, message: Message | str | bytes) -> str:
    """Wait until a message was put aside; return why."""
    tag = message["properties"]["delivery_tag"] if isinstance(message, dict) else message

    def found() -> Iterable[str]:
        return [entry["why"] for entry in dead(fleet) if _has(entry["message"], tag)]

    eventually(found, what=f"message {tag!r} put aside")
    return next(iter(found()))


def _has(text: str, tag: str | bytes) -> bool:
    return (tag.decode(errors="replace") if isinstance(tag, bytes) else tag) in text
