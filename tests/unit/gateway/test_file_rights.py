"""Lists of files for tokens that see some tasks alone: few round trips, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuflow.gateway import files
from gpuflow.gateway.file_rights import FileRights
from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.fleet_calls import SCAN_THREADS, THREADS, Calls
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.settings import Settings
from gpuflow.tokens.rights import FLEET, Grant, Role
from gpuflow.tokens.texts import Kind, new_token
from tests.support.waiting import patient

BEN = Grant(role=Role.VIEWER, owner="ben", token_id="1", digest="d")


class Ledger:
    """Records of tasks; counts the round trips."""

    def __init__(self, owners: dict[str, str]) -> None:
        self.owners, self.round_trips = owners, 0

    def find(self, task_id: str) -> TaskRecord | None:
        return self.heads([task_id])[0]

    def heads(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        self.round_trips += 1
        return [
            TaskRecord(id=one, state=TaskState.SUCCEEDED, owner=self.owners[one]) if one in self.owners else None
            for one in task_ids
        ]


class InThread:
    """Runs calls for an app, as `Calls` does."""

    def __init__(self, ledger: Ledger) -> None:
        self.app = SimpleNamespace(ledger=ledger)

    async def run(self, call: Callable[[Any], Any]) -> Any:
        return await asyncio.to_thread(call, self.app)

    scan = run


def folder_of(root: Path, owners: dict[str, str]) -> tuple[ResultsFolder, FileRights, Ledger]:
    for task in owners:
        (root / task).mkdir()
        (root / task / "responses.json").write_text("[]")
    ledger = Ledger(owners)
    return ResultsFolder(root), FileRights(cast("Calls", InThread(ledger))), ledger


async def test_a_list_asks_for_many_tasks_at_once(tmp_path: Path) -> None:
    owners = {f"task{number:04}": "ana" for number in range(1000)} | {"task0500": "ben"}
    folder, rights, ledger = folder_of(tmp_path, owners)

    found, following = await rights.search(folder, BEN, "", after="", limit=10)

    assert [one.task_id for one in found] == ["task0500"]
    assert following is None
    assert ledger.round_trips == 5


async def test_a_list_ends_after_so_many_tasks_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_DECIDED", 7)
    monkeypatch.setattr(files, "_CHUNK", 3)
    ids = [f"{number * 7919 % 1000:03}-{number}" for number in range(40)]
    owners = {one: "ben" if number % 5 == 0 else "ana" for number, one in enumerate(ids)}
    folder, rights, ledger = folder_of(tmp_path, owners)
    hers = sorted(one for one, owner in owners.items() if owner == "ana")
    found: list[str] = []
    after: str | None = ""
    pages = 0
    while after is not None:
        before = ledger.round_trips
        entries, after = await rights.search(folder, BEN, "", after=after, limit=2)
        found += [one.task_id for one in entries]
        assert ledger.round_trips - before <= 3
        assert after not in hers, "the id of another's task"
        pages += 1

    assert found == sorted(one for one, owner in owners.items() if owner == "ben")
    assert pages > 5
    whole, following = await rights.search(folder, FLEET, "", after="", limit=100)
    assert (len(whole), following) == (40, None)


async def test_tokens_are_checked_while_every_other_thread_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, go, begun = Calls(Settings()), threading.Event(), threading.Semaphore(0)
    token = new_token(Kind.USER)

    def held(_: Any) -> None:
        begun.release()
        go.wait(patient(30))

    def run(call: Callable[[Any], Any]) -> Any:
        return call(SimpleNamespace(redis=None, keys=None)) if call is held else BEN

    monkeypatch.setattr(calls, "_run", run)
    waiting = [asyncio.ensure_future(calls.run(held)) for _ in range(THREADS)]
    waiting += [asyncio.ensure_future(calls.scan(held)) for _ in range(SCAN_THREADS + 1)]
    try:
        for _ in range(THREADS + SCAN_THREADS):
            assert await asyncio.to_thread(begun.acquire, timeout=patient(30))
        async with asyncio.timeout(patient(10)):
            assert await calls.find_token(token) is BEN
            assert await calls.still_valid([BEN]) is cast("Any", BEN)
        assert not begun.acquire(blocking=False), "more scans than there are threads for them"
    finally:
        go.set()
        await asyncio.gather(*waiting)
