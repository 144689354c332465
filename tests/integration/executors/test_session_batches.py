"""A batch of a session that fails: its requests are answered one by one, and nothing of it is in memory then."""

from __future__ import annotations

import asyncio
import io
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.sessions.batching import Unit
from executors.sessions.engine import EngineDied
from executors.sessions.transformers_engine import Call, TransformersEngine
from gpuflow.protocol import Emitter, Request

pytestmark = pytest.mark.ml


class Tensor:
    """What a batch has in memory."""


class Fragile:
    """Fails for more than one request at once; notes how much of earlier batches is still there."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._made: list[weakref.ref[Tensor]] = []
        self.left: list[int] = []

    def do(self, batch: Sequence[Unit[Call]]) -> None:
        self.left.append(sum(1 for one in self._made if one() is not None))
        tensor = Tensor()
        self._made.append(weakref.ref(tensor))
        if len({id(unit.call) for unit in batch}) > 1:
            try:
                raise ValueError("the first cause holds the frame, too")
            except ValueError as error:
                raise RuntimeError(self._message) from error
        batch[0].call.finish_unit(batch[0].index, {"ok": True})


def call(folder: Path) -> Call:
    request = Request(task_id="t", task_type="inference", spec={}, output_dir=str(folder))
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return Call(request=request, emitter=Emitter(io.StringIO()), key="", batch_size=8, units=1, done=done)


async def test_a_batch_without_memory_is_gone_when_its_requests_are_tried_again(tmp_path: Path) -> None:
    engine, work = TransformersEngine("inference"), Fragile("CUDA out of memory. Tried to allocate 2 GiB")
    engine._work = work  # type: ignore[assignment]
    calls = [call(tmp_path) for _ in range(3)]

    engine._run_batch([Unit(call=one, index=0) for one in calls])

    assert [await one.done for one in calls] == [[{"ok": True}]] * 3
    assert work.left == [0, 0, 0, 0]


async def test_a_fault_of_the_device_ends_the_engine(tmp_path: Path) -> None:
    engine = TransformersEngine("inference")
    engine._work = Fragile("CUDA error: an illegal memory access was encountered")  # type: ignore[assignment]
    calls = [call(tmp_path) for _ in range(2)]

    engine._run_batch([Unit(call=one, index=0) for one in calls])

    for one in calls:
        with pytest.raises(EngineDied):
            await one.done
    with pytest.raises(EngineDied, match="illegal memory access"):
        engine.check()


async def test_one_that_fails_alone_has_its_own_error(tmp_path: Path) -> None:
    engine = TransformersEngine("inference")
    one = call(tmp_path)

    class Broken:
        def do(self, batch: Any) -> None:
            raise KeyError("rows")

    engine._work = Broken()  # type: ignore[assignment]
    engine._run_batch([Unit(call=one, index=0)])

    with pytest.raises(ExecutorError, match="rows") as raised:
        await one.done
    assert (raised.value.type, raised.value.retryable) == ("KeyError", False)
