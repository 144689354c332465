"""Checks that what this worker takes was submitted by a holder of the fleet's key; asked for each message.

A message that is refused is put aside (`gpuflow dead messages`). It ends no task but one whose own record holds that
very message, and no pipeline but one whose own record is refused: who only writes to a queue can kill nothing. A flood
of them makes a line in the log and an entry in the audit log a minute; the metric counts them all.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.audit.entries import record
from gpuflow.broker.lease import Used
from gpuflow.broker.merged_calls import arguments
from gpuflow.broker.signed_messages import checked, require_unused
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.pipelines.controller import RECONCILE_TASK
from gpuflow.signatures import CLOCKS_SECONDS, SignatureRefused, Signer
from gpuflow.worker.consumer import fail_of_message

log = get_logger("gpuflow.signatures")

#: Messages refused for one reason are told of at most once in so many seconds; what came meanwhile is counted.
TELL_SECONDS: Final = 60.0
#: Field of `gpuflow.metrics` (metrics/counters.py).
COUNT: Final = "refused"


@dataclass(kw_only=True)
class _Told:
    """When messages refused for one reason were last told of (monotonic seconds), and how many came since."""

    at: float
    since: int = 0


class SignedWork:
    """The checker of one worker's lease table. Called by the thread of its consumer."""

    def __init__(self, app: Any, signer: Signer, worker_id: str) -> None:
        self._app = app
        self._signer = signer
        self._worker = worker_id
        self._told: dict[str, _Told] = {}

    def check(self, raw: bytes, queue: str) -> Used | None:
        """Return the signature of a message. Raises SignatureRefused, unless such work is taken; redis errors."""
        try:
            found = checked(self._signer, _decoded(raw), queue=queue)
            require_unused(self._app.redis, self._app.keys, found)
        except SignatureRefused as error:
            if self._signer.requires:
                raise
            self._note("", error)
            return None
        return Used(found.id, max(1, int(found.until - time.time()) + CLOCKS_SECONDS))

    def refused(self, task_id: str, error: SignatureRefused, raw: bytes) -> None:
        """Tell of a message that is put aside; its task ends if its record holds that message. Raises redis errors."""
        self._note(task_id, error)
        if task_id and error.reason != "queue":  # a copy of the true message in another queue is what the record holds
            stored, state = self._app.redis.hmget(self._app.keys.task(task_id), "message", "state")
            # A copy of what has ended and was acknowledged changes nothing that Celery was told then.
            is_over = error.reason == "replayed" and state is not None and TaskState(state).final
            if stored == raw.decode(errors="replace") and not is_over:
                fail_of_message(self._app, task_id, error)
        pipeline_id = _pipeline_to_reconcile(raw)
        if pipeline_id:
            self._app.pipeline_controller.refuse_unsigned(pipeline_id)

    def _note(self, task_id: str, error: SignatureRefused) -> None:
        self._app.redis.hincrby(self._app.keys.metrics, f"{COUNT}\n{error.reason}\n{self._signer.mode}", 1)
        now, told = time.monotonic(), self._told.get(error.reason)
        if told is not None and now < told.at + TELL_SECONDS:
            told.since += 1
            return
        count = 1 + (told.since if told is not None else 0)
        self._told[error.reason] = _Told(at=now)
        if not self._signer.requires:
            log.warning("message_would_be_refused", task=task_id, reason=error.reason, cause=str(error), count=count)
            return
        log.error("message_refused", task=task_id, reason=error.reason, cause=str(error), count=count)
        details = {"reason": error.reason, "count": count}
        actor = f"worker:{self._worker}"
        record(self._app.redis, self._app.keys, "message.refuse", f"task:{task_id}", details, actor=actor)


def _pipeline_to_reconcile(raw: bytes) -> str:
    """Return the pipeline that a message would reconcile; "" for any other message."""
    try:
        message = json.loads(raw)
        if message["headers"]["task"] != RECONCILE_TASK:
            return ""
        (pipeline_id,) = arguments(message)[0]
        return pipeline_id if isinstance(pipeline_id, str) else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise SignatureRefused("malformed", "the message is not UTF-8") from None
