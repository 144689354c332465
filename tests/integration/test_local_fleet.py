"""A fleet inside a program, and waits inside an event loop."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from kombu import pools

import gpuflow
from gpuflow.client import Task, submit
from gpuflow.errors import TaskCancelled
from gpuflow.fleet.registry import Fleet
from tests.support.fleet import TestFleet, gone
from tests.support.waiting import eventually, patient


def test_a_local_fleet_brings_its_worker_back_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")  # of another fleet: it is not used
    addresses = set(map(str, pools.connections))
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    with gpuflow.local_fleet(tmp_path) as app:
        (worker,) = Fleet(app.redis, app.keys).workers()
        psutil.Process(worker.pid).send_signal(signal.SIGKILL)
        gone([worker.pid])

        task = submit({"taskType": "echo", "echo": {"output": 1}, "resources": {"accelerators": "cpu"}}, app=app)

        assert task.get(timeout=patient(60))["output"] == 1
        registry = Fleet(app.redis, app.keys)
        (again,) = eventually(lambda: [one for one in registry.workers() if one.pid != worker.pid], what="its entry")
        started = {again.pid, *(child.pid for child in psutil.Process().children(recursive=True))} - others
    gone(sorted(started))
    assert set(map(str, pools.connections)) == addresses, "connections of the fleet are still kept"
    assert (tmp_path / "results" / task.id / "responses.json").is_file()


def test_awaited_tasks_hold_no_thread_and_do_not_keep_their_loop_from_closing(fleet: TestFleet) -> None:
    tasks = [submit(fleet.echo(), app=fleet.app) for _ in range(3)]  # no worker takes them

    async def result(task: Task) -> Any:
        return await task

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = [asyncio.ensure_future(result(task)) for task in tasks]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(result(tasks[0]), 0.1)
        await asyncio.to_thread(tasks[2].cancel)
        with pytest.raises(TaskCancelled):
            await waiting[2]
        assert not waiting[0].done()
        for one in waiting[:2]:
            one.cancel()
        await asyncio.wait(waiting)

    asyncio.run(main())

    assert [task.state for task in tasks] == ["QUEUED", "QUEUED", "CANCELLED"]
