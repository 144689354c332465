"""How full a queue is, and which place a task has in it. Read-only; used by `gpuflow.explaining`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from gpuflow.broker.keys import Keys
from gpuflow.broker.priorities import list_keys
from gpuflow.ledger.ledger import Ledger
from gpuflow.routing.views import QueueView

#: A task's place is looked for among so many messages of a queue, in pages of so many.
_SEARCHED: Final = 20_000
_PAGE: Final = 1000


def queue_view(client: Any, keys: Keys, ledger: Ledger, name: str, task_id: str, now: float) -> QueueView:
    """Return the depth of a queue, the place of a task in it (1 is next; None: not found in it) and its oldest age.

    `now` is Unix seconds on the server's clock.
    """
    lists = [f"{keys.prefix}{key}" for key in list_keys([name])]
    pipe = client.pipeline(transaction=False)
    for key in lists:
        pipe.llen(key)
        pipe.lindex(key, -1)
    answers = pipe.execute()
    lengths, heads = answers[::2], answers[1::2]
    times = [at for head in heads if head and (at := _sent_at(head, ledger)) is not None]
    return QueueView(
        name=name,
        depth=sum(lengths),
        place=_place(client, lists, lengths, task_id) if task_id else None,
        oldest_seconds=max(0.0, now - min(times)) if times else None,
    )


def next_tasks(client: Any, keys: Keys, names: Sequence[str]) -> dict[str, str]:
    """Return the id of the task that is next in each of these queues; nothing for one whose message is not read."""
    pipe = client.pipeline(transaction=False)
    lists = [(name, f"{keys.prefix}{key}") for name in names for key in list_keys([name])]
    for _, key in lists:
        pipe.lindex(key, -1)
    found: dict[str, str] = {}
    for (name, _), message in zip(lists, pipe.execute(), strict=True):
        if message and name not in found:
            try:
                found[name] = str(json.loads(message)["headers"]["id"])
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _place(client: Any, lists: list[str], lengths: list[int], task_id: str) -> int | None:
    """Return a task's place: the lists are in order of priority, and the next message is at the end of each."""
    before = 0
    wanted = json.dumps(task_id)
    for key, length in zip(lists, lengths, strict=True):
        for start in range(0, min(length, _SEARCHED - before), _PAGE):
            page = client.lrange(key, -start - _PAGE, -start - 1)
            for number, message in enumerate(reversed(page)):
                if wanted in message:
                    return int(before + start + number + 1)
        before += length
        if before >= _SEARCHED:
            return None
    return None


def _sent_at(message: str, ledger: Ledger) -> float | None:
    """Return when a message was sent: as it says itself, else as the record of its task says."""
    try:
        content = json.loads(message)
        if isinstance(content.get("at"), int | float):
            return float(content["at"])
        record = ledger.find(str(content["headers"]["id"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return record.created_at if record is not None else None
