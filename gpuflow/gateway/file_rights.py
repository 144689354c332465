"""Whose files of results a token reads, writes and removes. Reads records of the fleet; touches no file.

The fleet's token, operators and admins do everything. Of the others:

* a viewer or submitter of an owner reads what the owner's tasks have, one without an owner reads all;
* a submitter writes uploads, and removes files of its owner's tasks;
* a worker writes into the folder of an attempt that it runs now, and uploads; it reads and removes files of its tasks,
  and reads those of owners whose work it runs now, and of pipelines that go on, which it may have to bring forward.

`uploads/<SHA-256>/<name>` is content by its digest, for whoever knows that. Who writes there proves the digest, so that
nobody can put other content in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from anyio import to_thread

from gpuflow.artifacts.references import UPLOADS
from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.registry import Fleet
from gpuflow.gateway.files import Entry, ResultsFolder
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.problems import Problem
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.tokens.rights import Grant, Right, Role

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
#: Roles that do everything with every file.
_ALL: Final = (Role.OPERATOR, Role.ADMIN)
_LIVE: Final = (TaskState.STARTING, TaskState.RUNNING)


class Action(StrEnum):
    """What is done with a file."""

    READ = "read"
    WRITE = "write"
    REMOVE = "remove"


class FileRights:
    """Decides by the records of the fleet. Its methods raise Problem."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def check(
        self, caller: Grant, action: Action, task_id: str, name: str = "", sha256: str | None = None
    ) -> None:
        """Let a token do something with a file of a task, or with all of them (`name` ''); else raise Problem.

        What may not be read is 404, as if there were none; what may not be written 403, whether it is there or not.
        """
        if _has_all(caller):
            return
        if action is Action.WRITE and task_id == UPLOADS:
            _check_upload(caller, name, sha256)
            return
        if action is not Action.READ and not caller.worker and not caller.may(Right.SUBMIT):
            raise _refused(caller)
        if action is Action.WRITE:
            if not caller.worker or not await self._calls.run(
                lambda app: holds_attempt(app, caller.worker, task_id, name)
            ):
                raise _refused(caller)
            return
        if action is Action.READ and caller.scope is None and not caller.worker:
            return
        if not await self._calls.run(lambda app: self.sees(app, caller, action, task_id, name)):
            raise Problem(404, "no-such-file", f"there is no file {name[:200]!r} in the results of this task")

    def sees(self, app: GPUFlow, caller: Grant, action: Action, task_id: str, name: str) -> bool:
        """Say whether a token reads, or removes, a file of a task."""
        if task_id == UPLOADS:
            return action is Action.READ and _DIGEST.fullmatch(name.partition("/")[0]) is not None
        return task_id in _seen(app, caller, action, [task_id])

    async def lists(self, caller: Grant, task_id: str) -> bool:
        """Say whether a token sees which files a task has."""
        if caller.scope is None and not caller.worker:
            return True
        return await self._calls.run(lambda app: self.sees(app, caller, Action.READ, task_id, ""))

    async def search(
        self, folder: ResultsFolder, caller: Grant, prefix: str, *, after: str, limit: int
    ) -> tuple[list[Entry], str | None]:
        """Return the files that `folder.search` finds in tasks whose files a token sees."""
        if caller.scope is None and not caller.worker:
            return await to_thread.run_sync(lambda: folder.search(prefix, after=after, limit=limit))

        def found(app: GPUFlow) -> tuple[list[Entry], str | None]:
            def only(task_ids: Sequence[str]) -> set[str]:
                return _seen(app, caller, Action.READ, task_ids)

            return folder.search(prefix, after=after, limit=limit, only=only)

        of_one_task = prefix.partition("/")[0]
        return await (self._calls.run(found) if of_one_task else self._calls.scan(found))


def _has_all(caller: Grant) -> bool:
    """Say whether a token does everything with every file."""
    return not caller.worker and caller.role in _ALL


def holds_attempt(app: GPUFlow, worker: str, task_id: str, name: str) -> bool:
    """Say whether a worker runs the attempt of a task now whose folder a name lies in."""
    return any(
        record.state in _LIVE and record.worker == worker and name.startswith(f"attempt-{record.attempt}/")
        for record in app.ledger.as_seen([app.ledger.find(task_id)])
    )


def _seen(app: GPUFlow, caller: Grant, action: Action, task_ids: Sequence[str]) -> set[str]:
    """Return those of some tasks whose files a token reads, or removes, in a few round trips for all of them."""
    found = app.ledger.heads([task_id for task_id in task_ids if task_id != UPLOADS])
    records = [record for record in found if record is not None]
    if not caller.worker:
        if action is not Action.READ and caller.scope is None:
            return set()
        return {record.id for record in records if caller.sees(record.owner)}
    own = {record.id for record in records if record.worker == caller.worker}
    if action is not Action.READ:
        return own
    return own | _inputs(app, caller.worker, [record for record in records if record.id not in own])


def _inputs(app: GPUFlow, worker: str, records: Sequence[TaskRecord]) -> set[str]:
    """Return the tasks whose results a worker may need: of owners whose work it runs, of pipelines that go on."""
    if not records:
        return set()
    pipelines = app.pipelines.find_many(sorted({record.pipeline for record in records if record.pipeline}))
    go_on = {one.id for one in pipelines if one is not None and not one.state.final}
    running = app.ledger.as_seen(app.ledger.heads(Fleet(app.redis, app.keys).last_tasks(worker)))
    owners = {one.owner for one in running if one.worker == worker and one.state in _LIVE}
    return {record.id for record in records if record.pipeline in go_on or record.owner in owners}


def _check_upload(caller: Grant, name: str, sha256: str | None) -> None:
    """Let somebody write `uploads/<SHA-256>/<name>` who proves the digest."""
    if not caller.worker and not caller.may(Right.SUBMIT):
        raise _refused(caller)
    digest = name.partition("/")[0]
    if _DIGEST.fullmatch(digest) is None or sha256 != digest:
        raise Problem(
            403,
            "not-authorised",
            "this token writes uploads/<SHA-256>/<name> alone, with the header Repr-Digest of that SHA-256",
        )


def _refused(caller: Grant) -> Problem:
    whose = "results of attempts that it runs now" if caller.worker else "uploads/<SHA-256>/<name>"
    return Problem(403, "not-authorised", f"this token may not write or remove that; it may write {whose}")
