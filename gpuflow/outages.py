"""One line when the broker goes away, one when it is back, and the number of lines between that were left out.

What an outage causes is told by many: the events of each task, heartbeats, leases, Celery's consumer. Each of these
lines is right, and together they drown the cause. `SymptomFilter`, on the handlers of a process, lets none of them
through while an outage lasts; the first of them begins it. Nor does it let through what Celery says of what we say.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Final

from gpuflow.terminal import one_line

#: Events that follow from a broker that is away, refuses writes or denies the user; each names its cause as `cause`.
SYMPTOMS: Final = frozenset(
    {
        "broker_away",
        "duties_not_done",
        "end_not_told_yet",
        "events_not_reported",
        "follow_up_not_published",
        "heartbeat_not_written",
        "housekeeping_not_done",
        "lease_left_to_the_sweep",
        "lease_to_be_settled",
        "leases_left_to_the_sweep",
        "leases_not_renewed",
        "lock_of_beats_kept",
        "message_left_to_the_sweep",
        "message_not_checked",
        "queue_not_told",
        "queues_not_read",
        "results_not_cleaned",
        "scaling_not_done",
        "schedules_not_run",
        "workers_not_released",
        "wrong_tokens_not_noted",
    }
)
#: Celery's own lines about its connection.
_CELERY: Final = "celery.worker.consumer.consumer"
_CELERY_LINE: Final = re.compile(r"consumer: (?:Connection to broker lost|Cannot connect to )")
_DENIED: Final = re.compile(r"\b(?:WRONGPASS|NOAUTH|NOPERM)\b|invalid username-password|Authentication required", re.I)
#: The client cuts some codes off the text (OOM, READONLY, MASTERDOWN): what is left of it counts as well.
_REFUSED: Final = re.compile(
    r"\b(?:MISCONF|BUSY|NOREPLICAS|READONLY|OOM|MASTERDOWN|CLUSTERDOWN)\b"
    r"|used memory|read only replica|Link with MASTER is down"
)


#: Lines of Celery's that repeat one of ours, by logger: `ready` or `broker_is_back`, and what became of a delivery.
_REPEATS: Final = {
    _CELERY: re.compile(r"Started consuming from gpuflow\."),
    "celery.worker.consumer.connection": re.compile(r"Connected to "),
    "celery.app.trace": re.compile(r"Task gpuflow\.\S+ ignored$"),
}
#: Lines of the server under Flower that tell of a page which it could not answer while the broker is away, by logger.
_UNANSWERED: Final = {name: re.compile("503 ") for name in ("tornado.access", "tornado.general")}
#: What says, within an outage, no more than `broker_is_back` will.
_NEW_SERVER: Final = "new_server_run"

#: A broker that has refused no write for so many seconds may take them again, as far as a reader can know.
QUIET_SECONDS: Final = 60.0


def kind_of(cause: str) -> str:
    """Return the event that names an outage with this cause: the broker denies us, refuses writes, or is away."""
    if _DENIED.search(cause):
        return "broker_denies"
    return "broker_refuses" if _REFUSED.search(cause) else "broker_lost"


class Outage:
    """Whether the broker serves this process. Safe to use from several threads.

    `tell` writes a line: event, level and fields.
    """

    def __init__(self, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._kinds: set[str] = set()
        self._since = self._last = 0.0
        self._left_out = 0

    @property
    def lasts(self) -> bool:
        """Whether the broker is away, or refuses or denies this process, as far as it has been noticed."""
        return self._left_out > 0

    def symptom(self, cause: str) -> None:
        """Note one line that is left out. The first cause, and the first of each other kind, is told; "" names none."""
        kind = kind_of(cause)
        with self._lock:
            self._last = self._clock()
            if not self._left_out:
                self._since = self._last
            new = bool(cause) and kind not in self._kinds
            if new:
                self._kinds.add(kind)
            self._left_out += 1
        if new:
            self._tell(kind, logging.ERROR, cause=cause)

    def answered(self) -> None:
        """Note that the broker has answered what may have been a read, which says nothing of writes.

        So an outage in which it refused some lasts until it has refused none for QUIET_SECONDS.
        """
        if self._left_out and ("broker_refuses" not in self._kinds or self._clock() - self._last >= QUIET_SECONDS):
            self.over()

    def over(self, since: float = math.inf) -> None:
        """Note that the broker has served this process, writes as well as reads, from `since` (monotonic seconds) on.

        Where it has refused something since then, that is the newer word.
        """
        if not self._left_out:  # the usual case, at each turn of a loop
            return
        with self._lock:
            if since < self._last:
                return
            seconds, left_out = self._clock() - self._since, self._left_out
            self._kinds, self._left_out = set(), 0
        if not left_out:
            return
        self._tell("broker_is_back", logging.WARNING, away_seconds=round(seconds, 1), lines_left_out=left_out)


def _tell(event: str, level: int, **fields: object) -> None:
    text = " ".join(f"{name}={one_line(value, 1000)}" for name, value in {"event": event, **fields}.items())
    logging.getLogger("gpuflow.broker").log(level, text, extra={"gpuflow": {"event": event, **fields}})


outage: Final = Outage(_tell)


class SymptomFilter(logging.Filter):
    """Takes the lines out that an outage causes. On each handler of a process; a line is counted once."""

    def __init__(self, seen_by: Outage = outage) -> None:
        super().__init__()
        self._outage = seen_by

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is written."""
        if record.levelno <= logging.INFO and self._repeats(record):
            return False
        cause = _cause_of(record)
        if cause is None and self._outage.lasts and _is_unanswered(record):
            cause = ""
        if cause is None:
            return True
        if not getattr(record, "gpuflow_counted", False):
            record.gpuflow_counted = True
            self._outage.symptom(cause)
        return False

    def _repeats(self, record: logging.LogRecord) -> bool:
        repeated = _REPEATS.get(record.name)
        if repeated is not None:
            return repeated.match(record.getMessage()) is not None
        if not self._outage.lasts:
            return False
        fields = getattr(record, "gpuflow", None)
        return isinstance(fields, dict) and fields.get("event") == _NEW_SERVER


def _is_unanswered(record: logging.LogRecord) -> bool:
    text = _UNANSWERED.get(record.name)
    return text is not None and text.match(record.getMessage()) is not None


def _cause_of(record: logging.LogRecord) -> str | None:
    fields = getattr(record, "gpuflow", None)
    if isinstance(fields, dict):
        return str(fields.get("cause", "")) if fields.get("event") in SYMPTOMS else None
    if record.name != _CELERY or record.levelno < logging.WARNING:
        return None
    text = record.getMessage()
    if not _CELERY_LINE.match(text):
        return None
    _, cannot, cause = text.splitlines()[0].partition("Cannot connect to ")
    return cause.rstrip(". ") if cannot else ""  # that a connection was lost says nothing of why
