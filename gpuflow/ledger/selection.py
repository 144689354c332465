"""Which tasks a command is about: filters over their records, and how they are found among those of a large fleet.

Used by the commands that list and steer (`gpuflow status|cancel|retry|dead`) and by `gpuflow.bulk`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState

if TYPE_CHECKING:
    from gpuflow.ledger.ledger import Ledger

#: Records that are read in one round trip.
_CHUNK: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Filters over tasks; a task is selected where all that are given hold. An empty one selects every task.

    `name`, `queue`, `worker` and the values of `labels` are globs; `older_seconds` and `newer_seconds` count from the
    submit, on the server's clock.
    """

    states: frozenset[TaskState] = frozenset()
    owner: str | None = None
    name: str | None = None
    queue: str | None = None
    worker: str | None = None
    pipeline: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    older_seconds: float | None = None
    newer_seconds: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no filter is given."""
        return self == Selection()

    def takes(self, record: TaskRecord, now: float) -> bool:
        """Say whether a record, as people are to see it, is selected; `now` in Unix seconds on the server's clock."""
        age = now - record.created_at
        return (
            (not self.states or record.state in self.states)
            and self.owner in (None, record.owner)
            and self.pipeline in (None, record.pipeline)
            and _fits(record.name, self.name)
            and _fits(record.queue, self.queue)
            and _fits(record.worker or "", self.worker)
            and all(name in record.labels and _fits(record.labels[name], glob) for name, glob in self.labels.items())
            and (self.older_seconds is None or age >= self.older_seconds)
            and (self.newer_seconds is None or age <= self.newer_seconds)
        )


def _fits(text: str, glob: str | None) -> bool:
    return glob is None or fnmatch.fnmatchcase(text, glob)


def select(ledger: Ledger, selection: Selection, limit: int | None = None) -> list[TaskRecord]:
    """Return the selected tasks, the newest first; of each what `Ledger.heads` reads, so neither spec nor result.

    Runs of merged calls are no tasks of anybody and are left out. Raises redis errors.
    """
    if limit is not None and limit <= 0:
        return []
    now = ledger.now()
    found: list[TaskRecord] = []
    for record in _candidates(ledger, selection, now):
        if not record.is_run and selection.takes(record, now):
            found.append(record)
            if len(found) == limit:
                break
    return found


def _candidates(ledger: Ledger, selection: Selection, now: float) -> Iterator[TaskRecord]:
    for ids in ledger.ids(
        chunk=_CHUNK,
        since=None if selection.newer_seconds is None else now - selection.newer_seconds,
        until=None if selection.older_seconds is None else now - selection.older_seconds,
        of=_index(selection.states),
    ):
        yield from ledger.as_seen(ledger.heads(ids))


def _index(states: frozenset[TaskState]) -> Literal["all", "unfinished", "dead"]:
    """Return the smallest list that holds every task in one of some states."""
    if states == {TaskState.DEAD}:
        return "dead"
    return "all" if not states or any(state.final for state in states) else "unfinished"
