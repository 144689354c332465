"""Steer many tasks at once, thousands in seconds: used by `gpuflow cancel|retry|dead` with filters or several ids.

Each task is a step of its own, so whatever stops the work leaves what was done, and all of it may be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpuflow.errors import UnknownTask
from gpuflow.handles import reachable
from gpuflow.signatures import SignatureRefused

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow

#: Steps in one round trip: they take the server some tens of milliseconds, in which it serves nobody else.
_AT_ONCE: Final = 200


def _silent(_: int) -> None:
    """Show nothing."""


def cancel_many(
    app: GPUFlow,
    task_ids: Sequence[str],
    *,
    reason: str = "cancelled by a user",
    progress: Callable[[int], Any] = _silent,
) -> dict[str, str]:
    """Cancel tasks; return for each id `cancelled`, `requested` (its worker stops it now), `final` or `unknown`.

    `progress` is called with the number of tasks that are done so far. Raises BrokerUnavailable; what was done until
    then stays done.
    """
    verdicts: dict[str, str] = {}
    for first in range(0, len(task_ids), _AT_ONCE):
        with reachable():
            verdicts |= app.cancel_tasks(task_ids[first : first + _AT_ONCE], reason)
        progress(len(verdicts))
    return verdicts


def retry_many(app: GPUFlow, task_ids: Sequence[str], *, progress: Callable[[int], Any] = _silent) -> dict[str, str]:
    """Queue ended tasks again; as `cancel_many`.

    For each id `queued`, `not ended or succeeded`, `unknown`, or `not signed` by a holder of the fleet's key.
    """
    verdicts: dict[str, str] = {}
    for task_id in task_ids:
        with reachable():
            try:
                verdicts[task_id] = "queued" if app.ledger.retry_task(task_id) else "not ended or succeeded"
            except UnknownTask:
                verdicts[task_id] = "unknown"
            except SignatureRefused:
                verdicts[task_id] = "not signed"
        progress(len(verdicts))
    return verdicts
