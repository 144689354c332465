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

from executors.sessions.adapters import adapters_of, rank
from executors.sessions.batching import BatchQueue, Unit
from executors.sessions.channel import RequestEmitter, SessionEmitter, listen
from executors.sessions.lines import (
    MAX_BYTES,
    Abort,
    BadLine,
    Close,
    Open,
    Ping,
    Run,
    read_operation,
    too_long,
)
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
    assert operation(op="open", engine="vllm", spec={"taskType": "embedding"}, gpus=["GPU-1"], share_mib=9) == Open(
        spec={"taskType": "embedding"}, engine="vllm", task_type="embedding", gpus=("GPU-1",), share_mib=9
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
        (b'{"op": "open", "engine": "vllm", "spec": {"taskType": "container"}}', "inference, embedding"),
        (b'{"op": "open", "engine": "container", "spec": {}}', "engine container serves container"),
        (b'{"op": "open", "engine": "vllm", "spec": {}, "gpus": [1]}', "gpus"),
        (b'{"op": "open", "engine": "vllm", "spec": {}, "cache_dir": 1}', "cache_dir"),
        (b'{"op": "open", "engine": "vllm", "spec": {}, "share_mib": "8"}', "share_mib"),
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
    assert [str(line)[:24] if isinstance(line, BadLine) else line for line in heard] == [
        b"short\n",
        "a line is longer than 21",
        b"last",
        None,
    ]


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        (b'{"op": "run", "id": "a \\"b\\"", "request": {"task_id": "x"', 'a "b"'),
        (b'{"op":"run","id":"r1","request"', "r1"),
        (b'{"op": "run", "id": "never ends', None),
        (b'{"op": "run", "id": "\\x", "request"', None),
        (b'{"request": {"id": "inner"', None),
    ],
)
def test_a_line_too_long_names_its_request(beginning: bytes, name: str | None) -> None:
    refusal = too_long(beginning + b" " * 1000)

    assert refusal.id == name
    assert "data.path" in str(refusal) and len(str(refusal)) < 300


def test_a_line_may_hold_the_data_that_a_worker_puts_into_it() -> None:
    assert MAX_BYTES == 2 << 30


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


def test_a_large_result_of_a_request_goes_by_a_file_of_its_folder(tmp_path: Path) -> None:
    stream = io.StringIO()
    emitter = RequestEmitter(SessionEmitter(stream), "a")
    emitter.output_dir = str(tmp_path)
    value = {"items": ["x" * 1000] * 2000}

    emitter.result(value)

    (told,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (told["event"], told["id"], "value" in told) == ("result", "a", False)
    assert json.loads((tmp_path / told["file"]).read_text()) == value


def test_a_reader_that_has_gone_is_told_of_once() -> None:
    stream = io.StringIO()
    emitter = SessionEmitter(stream)
    told: list[int] = []
    emitter.gone = lambda: told.append(1)
    stream.close()

    emitter.status("working")
    emitter.status("working")

    assert told == [1]


# -- adapters ----------------------------------------------------------------------------------------------------


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
        yield " ".join(f"{unit.call.name}{unit.index}" for unit in queue.next_batch())


def test_calls_of_one_kind_share_batches_fairly() -> None:
    queue = queue_of((Call(name="a"), 6), (Call(name="b", key="other"), 1), (Call(name="c"), 2))
    assert list(batches(queue, 3)) == ["a0 a1 c0 c1", "b0", "a2 a3 a4 a5"]


def test_whoever_got_no_place_in_a_batch_keeps_its_turn() -> None:
    queue = queue_of(*((Call(name=name, batch_size=2), 3) for name in "abc"))
    assert list(batches(queue, 5)) == ["a0 b0", "c0 a1", "b1 c1", "a2 b2", "c2"]


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
    assert queue.next_batch() == []


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
        batch = queue.next_batch()
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
