"""What goes from a results folder, and when: the decision alone, pure. `results_cleaning` lists, asks and removes.

A task's folder outlives its record in Redis, which expires GPUFLOW_RETENTION_DAYS after the end: then nobody finds the
folder by the task any more. Attempts that were superseded go a day after the task has succeeded. Nothing of a task that
may still run is touched, and nothing that was written in the retention time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuflow.ledger.states import TaskState

#: Superseded attempts are kept this long after the task has succeeded, to see what went wrong, in seconds.
SUPERSEDED_SECONDS: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """The folder of one task. Times are Unix seconds; `attempts` maps a number to when anything in it was written."""

    task_id: str
    written_at: float
    attempts: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One entry of `uploads/`: its SHA-256, which is its name, and when it was written."""

    sha256: str
    written_at: float


@dataclass(frozen=True, kw_only=True)
class RecordView:
    """What counts of a task's record.

    `expires` says that Redis will forget it by itself; `needed`, that a pipeline that runs may read its result.
    """

    state: TaskState
    attempt: int = 0
    finished_at: float | None = None
    expires: bool = True
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A results folder as it was seen, and the records of its tasks; a task without one is not in `records`.

    `mentioned` are the uploads that tasks and pipelines name which have not ended.
    """

    folders: Sequence[TaskFolder] = ()
    uploads: Sequence[Upload] = ()
    records: Mapping[str, RecordView] = field(default_factory=dict)
    mentioned: Collection[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is to go: `path` below the results folder, and why. `task_id` is "" for an upload."""

    path: str
    why: str
    task_id: str = ""


def decide(listing: Listing, *, now: float, retention_seconds: float) -> list[Removal]:
    """Return what is to go, in the order of the listing. `now` in Unix seconds."""
    removals = [
        removal
        for folder in listing.folders
        for removal in _of_task(folder, listing.records.get(folder.task_id), now, retention_seconds)
    ]
    removals += [
        Removal(path=f"uploads/{upload.sha256}", why="expired")
        for upload in listing.uploads
        if now - upload.written_at > retention_seconds and upload.sha256 not in listing.mentioned
    ]
    return removals


def _of_task(folder: TaskFolder, record: RecordView | None, now: float, retention_seconds: float) -> Iterator[Removal]:
    newest = max(folder.written_at, *folder.attempts.values())
    whole = Removal(path=folder.task_id, task_id=folder.task_id, why="record_gone" if record is None else "expired")
    if record is None:
        if now - newest > retention_seconds:
            yield whole
        return
    if not record.state.final or record.finished_at is None:
        return
    if not record.expires and not record.needed and now - max(newest, record.finished_at) > retention_seconds:
        yield whole
        return
    if record.state is not TaskState.SUCCEEDED or now - record.finished_at <= SUPERSEDED_SECONDS:
        return  # what failed can be tried again, and goes on from the checkpoints of any attempt
    for number, written_at in sorted(folder.attempts.items()):
        if number < record.attempt and now - written_at > SUPERSEDED_SECONDS:
            yield Removal(path=f"{folder.task_id}/attempt-{number}", task_id=folder.task_id, why="superseded")
