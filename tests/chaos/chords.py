"""Chords of echo tasks, sent as any Celery user would: with a plain Celery task as their body, or a supervised one."""

from __future__ import annotations

import gc
import uuid
from dataclasses import dataclass
from typing import Any

from celery import chord, group

from tests.support.fleet import TestFleet


@dataclass(frozen=True, kw_only=True)
class SentChord:
    """The ids of one chord, and the Redis list in which its body notes each of its runs."""

    header: list[str]
    body: str
    key: str

    def runs(self, fleet: TestFleet) -> int:
        """Return how often the body has run."""
        return int(fleet.broker.client.llen(self.key))


def send_chord(fleet: TestFleet, size: int, *, supervised_body: bool = False, **echo: Any) -> SentChord:
    """Send a chord whose part n returns the output n. Its body is `tallies.tally`, or an echo task."""
    sent = _send(fleet, size, supervised_body, echo)
    # Each of Celery's results asks the broker when it is collected: let that be now, and not when the broker is gone.
    fleet.app.backend._pending_results.concrete.clear()
    gc.collect()
    return sent


def _send(fleet: TestFleet, size: int, supervised_body: bool, echo: dict[str, Any]) -> SentChord:
    app, key = fleet.app, f"tally:{uuid.uuid4()}"
    header = [
        app.signature("gpuflow.echo", kwargs={"spec": fleet.echo(output=number, **echo)}) for number in range(size)
    ]
    if supervised_body:
        body = app.signature("gpuflow.echo", kwargs={"spec": fleet.echo(output="body")}, immutable=True)
    else:
        body = app.signature("tallies.tally", kwargs={"key": key})
    sent = chord(group(header, app=app), app=app)(body)
    return SentChord(header=[part.id for part in sent.parent.results], body=sent.id, key=key)
