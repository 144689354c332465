"""Cancels that come while an event loop runs."""

from __future__ import annotations

import asyncio

import pytest

from executors import cancellation


@pytest.fixture(autouse=True)
def no_signal_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation._State, "raised", None)


def interrupt() -> None:
    """What the handler of a signal does, wherever it comes."""
    cancellation._raise_once(cancellation.Cancelled)


async def never() -> None:
    await asyncio.Event().wait()


def test_a_cancel_in_a_callback_ends_what_waits() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        await never()

    with pytest.raises(cancellation.Cancelled):
        cancellation.run_async(work())


def test_a_cancel_in_another_task_ends_what_waits() -> None:
    async def interrupted() -> None:
        interrupt()

    async def work() -> None:
        other = asyncio.ensure_future(interrupted())
        await never()
        await other

    with pytest.raises(cancellation.Cancelled):
        cancellation.run_async(work())


def test_a_cancel_in_the_work_itself_is_raised_and_a_result_is_returned() -> None:
    async def work(wanted: bool) -> str:
        if not wanted:
            interrupt()
        return "done"

    assert cancellation.run_async(work(True)) == "done"
    with pytest.raises(cancellation.Cancelled):
        cancellation.run_async(work(False))
