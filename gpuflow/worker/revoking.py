"""Celery's `revoke`, as it is sent by `AsyncResult.revoke()` and by Flower, for calls that were merged into a run.

No worker holds a message of such a call. Revoked, also with `terminate`, it leaves its run, which goes on for its
others. It is not flagged as revoked: a message that comes for the end of a call is not to be dropped.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.control import control_command
from redis.exceptions import RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.worker.runtime import find

log = get_logger("gpuflow.revoking")

_revoke_others: Final = control.revoke
#: Calls whose states are read at once.
PAGE: Final = 100


@control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(
    state: Any, task_id: str | Sequence[str], terminate: bool = False, signal: str | None = None, **options: Any
) -> Any:
    """Revoke tasks by id; with terminate, also those that run."""
    ids = list(maybe_list(task_id) or [])
    runtime = find()
    try:
        merged = set() if runtime is None else set(_merged(runtime.app, ids))
    except RedisError as error:
        return {"error": f"nothing was revoked, as the broker cannot say what was merged: {error}; revoke again"}
    if merged and runtime is not None:
        # The consumer loop must not wait: each of them takes some round trips.
        threading.Thread(target=_leave, args=(runtime.app, sorted(merged)), name="gpuflow-revoke", daemon=True).start()
    others = [one for one in ids if one not in merged]
    if not others and merged:
        return {"ok": f"tasks {', '.join(sorted(merged))} leave their runs"}
    return _revoke_others(state, others, terminate=terminate, signal=signal, **options)


def _merged(app: GPUFlow, ids: Sequence[str]) -> Iterator[str]:
    """Yield the ids of calls that were merged into a run, also of those that have ended."""
    client: Any = app.redis
    pipe = client.pipeline(transaction=False)
    for task_id in ids:
        pipe.hexists(app.keys.task(task_id), "run")
    yield from (task_id for task_id, is_merged in zip(ids, pipe.execute(), strict=True) if is_merged)


def _leave(app: GPUFlow, ids: Sequence[str]) -> None:
    """Cancel calls that have not ended. Every worker is told, so each begins elsewhere and passes over what is done."""
    start = random.randrange(len(ids))  # noqa: S311  (no secret)
    turned = [*ids[start:], *ids[:start]]
    for first in range(0, len(turned), PAGE):
        try:
            for record in app.ledger.find_many(turned[first : first + PAGE]):
                if record is not None and record.state is TaskState.MERGED:
                    app.cancel_task(record.id, "revoked")
        except (RedisError, GPUFlowError, OSError) as error:
            log.warning("merged_calls_not_revoked", cause=str(error))
