"""Parts of warm sessions that need no model: lines, requests, batches, sides."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.base import ExecutorError
from executors.sessions.adapters import adapters_of, rank
from executors.sessions.batching import BatchQueue, Unit
from executors.sessions.channel import RequestEmitter, SessionEmitter, listen
from executors.sessions.lines import Abort, BadLine, Close, Opening, Ping, Run, read_operation
from executors.sessions.requests import read_request
from executors.sessions.sides import Sides
from gpuflow.protocol import Request

# -- lines -------------------------------------------------------------------------------------------------------


def operation(**fields: Any) -> Any:
    return read_operation(json.dumps(fields).encode())


def test_every_operation_is_read() -> None:
    assert operation(op="run", id="a", request={"x": 1}) == Run(id="a", request={"x": 1})
    assert operation(op="abort", id="a") == Abort(id="a")
    assert operation(op="ping", n=7) == Ping(n=7)
    assert operation(op="close") == Close()
    assert operation(op="open", engine="vllm", spec={"taskType": "embedding"}, gpus=["GPU-1"]) == Opening(
        spec={"taskType": "embedding"}, engine="vllm", task_type="embedding", gpus=("GPU-1",)
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"no json", "no json"),
        (b"[1]", "no JSON object"),
        (b"{}", "op is None"),
        (b'{"op": ["run"]}', "it must be one of open, run"),
        (b'{"op": "run", "id": 3}', "must be text"),
        (b'{"op": "abort"}', "must be text"),
        (b'{"op": "open", "engine": "vllm"}', "needs spec"),
        (b'{"op": "open", "engine": "x", "spec": {}}', "vllm, transformers"),
        (b'{"op": "open", "engine": "vllm", "spec": {"taskType": "sft"}}', "inference, embedding"),
        (b'{"op": "open", "engine": "vllm", "spec": {}, "gpus": [1]}', "gpus"),
        (b'{"op": "open", "engine": "vllm", "spec": {}, "cache_dir": 1}', "cache_dir"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: bytes, says: str) -> None:
    with pytest.raises(BadLine) as raised:
        read_operation(line)
    assert says in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_bad_run_names_its_request() -> None:
    with pytest.raises(BadLine) as raised:
        operation(op="run", id="mine")
    assert raised.value.id == "mine"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_operation_or_a_bad_line(line: bytes) -> None:
    with contextlib.suppress(BadLine):
        read_operation(line)


def test_lines_too_long_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.sessions.channel.MAX_BYTES", 8)
    heard: list[Any] = []
    over = threading.Event()

    def hear(line: Any) -> None:
        heard.append(line)
        if line is None:
            over.set()

    listen(io.BytesIO(b"short\n\n123456789012345678901\nlast"), hear)

    assert over.wait(10)
    assert heard == [b"short\n", False, b"last", None]


def test_a_request_says_nothing_after_its_finish() -> None:
    stream = io.StringIO()
    emitter = RequestEmitter(SessionEmitter(stream), "a")

    emitter.text_delta("x", 0)
    emitter.result({"value": float("nan")})
    emitter.finish("completed")
    emitter.text_delta("y", 0)
    emitter.finish("cancelled")

    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["event"], one["id"]) for one in told] == [("text_delta", "a"), ("result", "a"), ("finish", "a")]
    assert told[1]["value"] == {"value": None}


def test_a_reader_that_has_gone_is_told_of_once() -> None:
    stream = io.StringIO()
    emitter = SessionEmitter(stream)
    told: list[int] = []
    emitter.gone = lambda: told.append(1)
    stream.close()

    emitter.status("working")
    emitter.status("working")

    assert told == [1]


# -- requests ----------------------------------------------------------------------------------------------------

OPENING = Opening(spec={"model": {"source": {"identifier": "org/model", "revision": None}}}, engine="vllm")


def request_of(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"task_id": "t", "task_type": "inference", "spec": {}, "output_dir": str(folder / "out"), **fields}


def test_a_request_is_read_with_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "Ana")
    spec = {"env": {"GREETING": "Hello ${env:NAME}"}, "data": {"items": ["${env:GREETING}"]}}

    request = read_request(request_of(tmp_path, spec=spec), OPENING)

    assert request.spec["data"]["items"] == ["Hello Ana"]
    assert (tmp_path / "out").is_dir()
    with pytest.raises(ExecutorError, match="GREETING is not set"):
        read_request(request_of(tmp_path, spec={"data": spec["data"]}), OPENING)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"spec": []}, "spec must be an object"),
        ({"output_dir": ""}, "output_dir"),
        ({"task_type": "embedding"}, "embedding"),
        ({"spec": {"model": {"source": {"identifier": "org/other"}}}}, "org/other"),
    ],
)
def test_a_request_for_another_session_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ExecutorError, match=says) as raised:
        read_request(request_of(tmp_path, **fields), OPENING)
    assert raised.value.type == "BadRequest"


def test_adapters_have_a_digest_that_follows_their_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "rank_pattern": {"q": 16}}')
    request = Request(
        task_id="t",
        task_type="inference",
        output_dir="",
        spec={"model": {"adapters": [{"path": str(tmp_path), "weight": 0.5}]}},
    )

    (first,) = adapters_of(request)
    (same,) = adapters_of(request)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    (other,) = adapters_of(request)

    assert (first, first.weight, rank(first)) == (same, 0.5, 16)
    assert other.digest != first.digest


# -- batches -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Call:
    name: str
    key: str = ""
    alone: bool = False
    batch_size: int = 4


def queue_of(*calls: tuple[Call, int], lonely: frozenset[int] = frozenset()) -> BatchQueue[Call]:
    queue: BatchQueue[Call] = BatchQueue()
    for call, count in calls:
        queue.put(call, [Unit(call=call, index=index, alone=index in lonely) for index in range(count)])
    return queue


def batches(queue: BatchQueue[Call], count: int) -> Iterator[str]:
    for _ in range(count):
        yield " ".join(f"{unit.call.name}{unit.index}" for unit in queue.take())


def test_calls_of_one_kind_share_batches_fairly() -> None:
    queue = queue_of((Call(name="a"), 6), (Call(name="b", key="other"), 1), (Call(name="c"), 2))
    assert list(batches(queue, 3)) == ["a0 a1 c0 c1", "b0", "a2 a3 a4 a5"]


def test_a_call_that_must_be_alone_is() -> None:
    queue = queue_of((Call(name="a", alone=True, batch_size=2), 3), (Call(name="b"), 1))
    assert list(batches(queue, 3)) == ["a0 a1", "b0", "a2"]


def test_a_unit_that_must_be_alone_is() -> None:
    queue = queue_of((Call(name="a"), 3), lonely=frozenset({1}))
    assert list(batches(queue, 3)) == ["a0", "a1", "a2"]


def test_dropped_and_closed() -> None:
    gone, stays = Call(name="a"), Call(name="b")
    queue = queue_of((gone, 2), (stays, 1))
    queue.drop(gone)
    assert list(batches(queue, 1)) == ["b0"]
    queue.close()
    assert queue.take() == []


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["x", "y"]), st.booleans(), st.sets(st.integers(0, 8))),
        min_size=1,
        max_size=6,
    )
)
def test_every_unit_comes_once_and_in_order(shapes: list[tuple[int, str, bool, set[int]]]) -> None:
    queue: BatchQueue[Call] = BatchQueue()
    for number, (count, key, alone, lonely) in enumerate(shapes):
        call = Call(name=str(number), key=key, alone=alone)
        queue.put(call, [Unit(call=call, index=index, alone=index in lonely) for index in range(count)])
    seen: dict[str, list[int]] = {}
    left = sum(count for count, *_ in shapes)
    while left:
        batch = queue.take()
        assert 0 < len(batch) <= 4
        assert len({unit.call.key for unit in batch}) == 1
        assert len(batch) == 1 or not any(unit.alone for unit in batch)
        for unit in batch:
            seen.setdefault(unit.call.name, []).append(unit.index)
        left -= len(batch)
    assert seen == {str(number): list(range(count)) for number, (count, *_) in enumerate(shapes)}


# -- sides -------------------------------------------------------------------------------------------------------


async def test_sides_never_meet_and_take_turns() -> None:
    sides = Sides()
    inside: list[bool] = []
    order: list[str] = []

    async def visit(name: str, side: bool, turns: int) -> None:
        async with sides.on(side):
            inside.append(side)
            order.append(name)
            for _ in range(turns):
                await asyncio.sleep(0)
                assert set(inside) == {side}
            inside.remove(side)

    async with asyncio.TaskGroup() as group:
        for name, side in (("a", False), ("b", False), ("C", True), ("d", False), ("E", True)):
            group.create_task(visit(name, side, 5))

    assert order == ["a", "b", "C", "E", "d"]


async def test_who_no_longer_waits_holds_nobody_up() -> None:
    sides = Sides()
    async with sides.on(False):
        waits = asyncio.create_task(_pass(sides, True))
        await asyncio.sleep(0)
        behind = asyncio.create_task(_pass(sides, False))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait_for(behind, 10)
    await asyncio.wait_for(_pass(sides, True), 10)


async def _pass(sides: Sides, side: bool) -> None:
    async with sides.on(side):
        pass
