"""Celery's `revoke`, as it is sent by `AsyncResult.revoke()` and by Flower, for calls that were merged into a run.

No worker holds a message of such a call. Revoked, also with `terminate`, it leaves its run, which goes on for its
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.control import control_command
from redis.exceptions import RedisError

from gpuflow.errors import GPUFlowError
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.worker.runtime import find

log = get_logger("gpuflow.revoking")

_revoke_others: Final = control.revoke


@control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(
    state: Any, task_id: str | Sequence[str], terminate: bool = False, signal: str | None = None, **options: Any
) -> Any:
    """Revoke tasks by id; with terminate, also those that run."""
    ids = list(maybe_list(task_id) or [])
    _leave_runs(ids)
    return _revoke_others(state, ids, terminate=terminate, signal=signal, **options)


def _leave_runs(ids: Sequence[str]) -> None:
    runtime = find()
    if runtime is None or not ids:
        return
    app = runtime.app
    try:
        for record in app.ledger.find_many(ids):
            if record is not None and record.state is TaskState.MERGED:
                app.cancel_task(record.id, "revoked")
    except (RedisError, GPUFlowError, OSError) as error:
        log.warning("merged_calls_not_revoked", cause=str(error))
