"""The books of a chaos test: what must be true of its tasks once the dust has settled.

`check(fleet, task_ids)` is the one entry. It waits for the end of every task, then for the tail of that end (Celery's
result, the ack), and then asserts. It reads records, results folders, Redis keys and /proc, and repairs nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpuflow.broker.priorities import list_keys
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES
from tests.support.fleet import TestFleet
from tests.support.waiting import BrokenPromise, eventually, patient, promised

#: What Celery calls each end of a task that ran (docs/reference/states.md).
CELERY_STATES = {
    TaskState.SUCCEEDED: "SUCCESS",
    TaskState.FAILED: "FAILURE",
    TaskState.DEAD: "FAILURE",
    TaskState.CANCELLED: "FAILURE",
}


def check(
    fleet: TestFleet,
    task_ids: Sequence[str],
    *,
    state: TaskState | None = TaskState.SUCCEEDED,
    within: float = 60.0,
    rolled_back: bool = False,
) -> list[TaskRecord]:
    """Assert that every task has ended once, in `state` (None: in any), with everything accounted for.

    Every number from 1 to the record's attempt has its entry in the history. No gap is legal, but after the broker
    was restarted from an older snapshot (`rolled_back`): then a number whose folder `attempt-N` exists may have lost
    its entry with the snapshot, since START goes on above the highest folder. Returns the records.
    """
    records = [_ended(fleet, task_id, within) for task_id in task_ids]
    for record in records:
        assert state is None or record.state is state, f"{record.id} ended {record.state}: {record.error}"
        check_attempts(fleet, record, rolled_back=rolled_back)
        check_result(fleet, record)
    _gone(lambda: leftovers(fleet), within, "an empty broker")
    check_orphans(fleet, task_ids)
    for record in records:
        check_celery(fleet, record)
        now = fleet.app.ledger.get(record.id)
        same = (now.state, now.attempt, now.manifest) == (record.state, record.attempt, record.manifest)
        promised(same, f"{record.id} has changed after its end: {record}, {now}")
    return records


def check_orphans(fleet: TestFleet, task_ids: Iterable[str], within: float = 60.0) -> None:
    """Wait until no process of the tasks is left. One that is still there then is not on its way out."""
    ids = list(task_ids)
    try:
        _gone(lambda: orphans(fleet, ids), within, "no process of the tasks")
    except AssertionError as error:
        raise BrokenPromise(f"orphans: {error}") from None


def _gone(found: Callable[[], dict[Any, Any]], within: float, what: str) -> None:
    """Wait until nothing is found any more; fail with what is."""
    deadline = time.monotonic() + patient(within)
    while left := found():
        assert time.monotonic() < deadline, f"{what} was not seen within {patient(within):g} s; there is: {left}"
        time.sleep(0.05)


def _ended(fleet: TestFleet, task_id: str, within: float) -> TaskRecord:
    def final() -> TaskRecord | None:
        record = fleet.app.ledger.find(task_id)
        return record if record is not None and record.state.final else None

    try:
        record = eventually(final, within=within)
    except AssertionError:
        # A look is many reads: a message that changes its place meanwhile may be missed, but not each time.
        lost = not any(leftovers(fleet) for _ in range(5)) and not final()
        record = fleet.app.ledger.find(task_id)
        promised(not lost, f"{task_id} is lost: the broker has nothing left that could end it; {record}")
        raise AssertionError(f"{task_id} has not ended: {record}") from None
    assert record is not None
    return record


def check_ran_once(records: Iterable[TaskRecord]) -> None:
    """Check that no task needed a second attempt: nothing happened to it that would have ended its first one."""
    again = {record.id: record.attempt for record in records if record.attempt != 1}
    promised(not again, f"tasks have run again: {again}")


def check_attempts(fleet: TestFleet, record: TaskRecord, *, rolled_back: bool = False) -> None:
    """Assert that each attempt has exactly one outcome, one of them the committed one, and the counters agree."""
    entries = {entry.attempt: entry for entry in fleet.app.ledger.attempts(record.id)}
    missing = set(range(1, record.attempt + 1)) - entries.keys()
    if rolled_back:
        missing = {number for number in missing if not _folder(fleet, record.id, number).is_dir()}
    promised(not missing, f"{record.id}: attempts {sorted(missing)} of {record.attempt} are missing: {entries}")
    promised(max(entries, default=0) <= record.attempt, f"{record.id}: an attempt above the record's: {entries}")
    outcomes = [entries[number].outcome for number in sorted(entries)]
    wins = outcomes.count("succeeded")
    promised(wins == (record.state is TaskState.SUCCEEDED), f"{record.id}: outcomes {outcomes}")
    promised(not wins or outcomes[-1] == "succeeded", f"{record.id}: outcomes {outcomes}")
    if not rolled_back:
        counted = (outcomes.count("lost"), outcomes.count("preempted"))
        promised(counted == (record.losses, record.preemptions), f"{record.id}: outcomes {outcomes}, {record}")


def check_result(fleet: TestFleet, record: TaskRecord) -> None:
    """Assert that the committed result is the one of the record's attempt, on disk and in the record."""
    if record.state is not TaskState.SUCCEEDED:
        promised(record.manifest is None, f"{record.id} ended {record.state} with a result")
        return
    folder = _folder(fleet, record.id, record.attempt)
    if record.manifest is None:
        promised(record.task_type == FUNCTION_TYPE and not folder.exists(), f"{record.id}: results without a manifest")
        return
    manifest = folder / "manifest.json"
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    promised(digest == record.manifest, f"{record.id}: another manifest")
    told = record.result.get("attempt", record.attempt)  # the echo executor says which attempt it was
    promised(told == record.attempt, f"{record.id}: the result of another attempt")


def check_celery(fleet: TestFleet, record: TaskRecord, within: float = 30.0) -> None:
    """Assert that Celery tells the same end."""
    ran = any(entry.outcome == "cancelled" for entry in fleet.app.ledger.attempts(record.id))
    waited = record.state is TaskState.CANCELLED and not ran
    result = celery_end(fleet, record.id, "REVOKED" if waited else CELERY_STATES[record.state], within)
    if record.state is TaskState.SUCCEEDED:
        # Celery has what a function returns; its record has where its files are, too.
        of_record = record.result["value"] if record.task_type == FUNCTION_TYPE else record.result
        assert result == of_record, f"{record.id}: Celery has another result"


def celery_end(fleet: TestFleet, task_id: str, status: str = "SUCCESS", within: float = 30.0) -> Any:
    """Wait until Celery says that a task has ended so, and return its result.

    Unlike `AsyncResult.get` it subscribes to nothing, so a test that fails leaves nothing behind in the backend.
    """

    def told() -> dict[str, Any] | None:
        meta: dict[str, Any] = fleet.app.backend.get_task_meta(task_id, cache=False) or {}
        return meta if meta.get("status") == status else None

    meta = eventually(told, within=within, what=f"Celery's {status} for {task_id}")
    assert meta is not None
    return meta["result"]


def leftovers(fleet: TestFleet) -> dict[str, Any]:
    """Return what is still leased, delayed or waiting, by key."""
    client, keys = fleet.broker.client, fleet.app.keys
    left = {key: client.zrange(key, 0, -1) for key in (keys.leases, keys.delayed)}
    left |= {key: client.hkeys(key) for key in (keys.unacked, keys.owners, keys.parked)}
    left[keys.returned] = client.zrange(keys.returned, 0, -1)
    left[keys.unreadable] = client.lrange(keys.unreadable, 0, -1)
    queues = [*client.smembers(keys.queues), CONTROL_QUEUE, *NOTICE_QUEUES, fleet.settings.task_topic]
    for key in list_keys(queues):
        left[keys.prefix + key] = client.lrange(keys.prefix + key, 0, -1)
    return {key: found for key, found in left.items() if found}


def orphans(fleet: TestFleet, task_ids: Iterable[str]) -> dict[int, str]:
    """Return the living processes of this machine that belong to the tasks, by environment or by working folder."""
    ids = list(task_ids)
    marks = {f"TASK_ID={task_id}".encode(): task_id for task_id in ids}
    folders = {fleet.results / task_id: task_id for task_id in ids}
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            cwd = Path(os.readlink(process / "cwd"))  # noqa: PTH115  (a path that may be gone)
        except OSError:
            continue
        named = next((marks[variable] for variable in variables if variable in marks), None)
        placed = next((folders[parent] for parent in (cwd, *cwd.parents) if parent in folders), None)
        if named or placed:
            found[int(process.name)] = named or placed or ""
    return found


def _folder(fleet: TestFleet, task_id: str, number: int) -> Path:
    return fleet.results / task_id / f"attempt-{number}"
