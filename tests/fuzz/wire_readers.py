"""Readers of what comes over a pipe or from Redis: a child's lines, its result, messages, Celery's values."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kombu.utils.json import dumps, loads
from rich.console import Console

from executors.base import ExecutorError
from executors.programs.heard import PROGRAM, Heard, check
from executors.programs.lines import split_lines
from executors.programs.running import Ran
from gpuflow.broker.merged_calls import arguments, control_message, hints_text, is_readable, read_message, run_message
from gpuflow.broker.wire import portable
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.ledger.records import AttemptEntry
from gpuflow.progress import render
from gpuflow.progress_model import ProgressModel
from gpuflow.protocol import Emitter, Request
from gpuflow.secrets import Redactor
from gpuflow.worker.attempt import Attempt
from gpuflow.worker.child import ChildEnd, LineKind, _Lines
from tests.fuzz.mutation import Mutator, as_json
from tests.fuzz.reader import Reader

_EVENTS: tuple[Any, ...] = (
    {"event": "connection", "status": "connected"},
    {"event": "worker", "status": "loading", "message": "fetching 43%"},
    {"event": "progress", "current": 3, "total": 60, "unit": "step", "metrics": {"loss": 1.25, "tokens_per_second": 9}},
    {"event": "progress", "current": 1048576, "total": None, "unit": "byte", "metrics": {}},
    {"type": "text_delta", "delta": "hel", "request": 0},
    {"event": "text", "content": "hello"},
    {"event": "artifact", "path": "a/b.txt"},
    {"event": "checkpoint", "path": "checkpoint-10", "step": 10},
    {"event": "result", "value": {"items": [{"output": "x"}], "usage": {"tokens": 3}}},
    {"event": "result", "file": ".result.json"},
    {"event": "finish", "status": "completed"},
    {"event": "finish", "status": "failed", "error": {"type": "BadInput", "message": "no", "retryable": False}},
    {"event": "log", "message": "a line"},
    {"event": "state", "state": "STARTING", "attempt": 2, "worker": "w1"},
    {"event": "state", "state": "FAILED", "error": {"message": "x"}},
    {"event": "stage", "stage": "train", "state": "DISPATCHED", "tasks": ["task"]},
)
#: Lines of one input: what is measured is a line of whatever size, not how many of them a child writes.
_MOST_LINES = 300
_TEXT_LINES = (
    b" 42%|####      | 420/1000 [00:42<00:58, 10.00it/s]",
    b"step 30/60 loss=0.25",
    b"epoch: 3 of 10",
    b"\x1b[2K\rdownloading",
    b"plain text \xff\xfe",
)


class _Ledger:
    """Takes what an attempt reports, as the broker does: every text in UTF-8."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def report(self, task_id: str, holder: Any, events: list[str], progress: str, meta: str) -> str:
        for text in (*events, progress, meta):
            text.encode()
        self.events += events
        return "ok"


class _Lived:
    """A child that has said what it had to say."""

    shim_pid = 0
    held_up_seconds = 0.0

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, timeout_seconds: float) -> Iterator[tuple[LineKind, bytes]]:
        cutter = _Lines()
        step = 1 + len(self._data) // 3
        for start in range(0, len(self._data), step):
            for line, cut in cutter.feed(self._data[start : start + step]):
                yield "cut" if cut else "event", line
        for line, cut in cutter.rest():
            yield "cut" if cut else "event", line
        for line in self._data[:2000].split(b"\n"):
            yield "log", line
        yield "tick", b""

    def wait(self) -> ChildEnd:
        return ChildEnd(exit_code=0, signal=None)

    def kill(self) -> None: ...

    terminate = notice = kill


class ChildLines(Reader):
    """The stdout of a child, from the pipe of its worker to the screen of whoever watches the task."""

    name = "events of a child"

    def made_of(self) -> Mutator:
        lines = [as_json(event) for event in _EVENTS]
        keys = sorted({key for event in _EVENTS for key in event} | {"child", "metrics", "value", "epoch", "beside"})
        words = (*lines, *_TEXT_LINES, b'{"event": "', b'"}\n', b'{"event":"result","value":', b"\n\n", b"1e400", b"\r")
        return Mutator([b"\n".join(lines[:6]), b"\n".join(lines), *lines, *_TEXT_LINES], words=words, keys=keys)

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return super().make(rng)
        lines = []
        for _ in range(rng.choice((1, 3, 8))):
            event = rng.choice(_EVENTS)
            lines.append(as_json(self.mutator.tree(rng, event) if rng.random() < 0.8 else event))
        return b"\n".join(lines)

    def read(self, data: bytes) -> None:
        ends = [found.start() for found in itertools.islice(re.finditer(rb"[\r\n]", data), _MOST_LINES)]
        data = data[: ends[-1]] if len(ends) == _MOST_LINES else data
        ledger: Any = _Ledger()
        request = Request(task_id="task", task_type="echo", spec={}, output_dir=str(self.folder))
        child: Any = _Lived(data)
        attempt = Attempt(
            request,
            ledger,
            None,  # type: ignore[arg-type]
            launch=lambda: child,
            log_path=self.folder / "log",
            log_max_bytes=1 << 20,
            grace_seconds=1,
            notice_seconds=1,
            redactor=Redactor(["hunter2-secret"]),
        )
        outcome = attempt.run()
        json.dumps([outcome.result, outcome.error, outcome.artifacts], ensure_ascii=False).encode("utf-8", "replace")
        _watched(ledger.events)
        _as_program(data, self.folder)


def _watched(events: list[str]) -> None:
    """Show events as `gpuflow run` and `watch` do."""
    model = ProgressModel.of_task("task", "train")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    for number, text in enumerate(events):
        data = json.loads(text)
        name = str(data.pop("event", "log"))
        model.update(LoggedEvent(id=f"{1_700_000_000_000 + number}-0", source="task", name=name, data=data))
    console.print(render(model, console, {}))


def _as_program(data: bytes, folder: Path) -> None:
    """Read the same as the lines of a program that a task runs."""
    said = io.StringIO()
    heard = Heard(Emitter(said), {})
    for line in split_lines(iter([data[:100], data[100:]])):
        heard.stdout(line)
    heard.close()
    said.getvalue().encode()
    try:
        check(Ran(0, noticed=False), heard, PROGRAM)
        heard.value(folder)
    except ExecutorError:
        pass


class Messages(Reader):
    """A stored message of a call, and what is made of it; a message that is none raises ValueError."""

    name = "messages"
    declared = (ValueError,)

    @staticmethod
    def _message(body: Any) -> dict[str, Any]:
        return {
            "queue": "gpu", "at": 1.5,
            "body": base64.b64encode(dumps(body).encode()).decode(),
            "content-encoding": "utf-8", "content-type": "application/json",
            "headers": {"id": "task-1", "task": "gpuflow.run", "lang": "py", "argsrepr": "()", "retries": 0,
                        "gpuflow_schema": 2, "group": None},
            "properties": {"correlation_id": "task-1", "delivery_tag": "t", "body_encoding": "base64", "priority": 5,
                           "delivery_info": {"exchange": "", "routing_key": "gpu"}},
        }  # fmt: skip

    def made_of(self) -> Mutator:
        spec = {"taskType": "echo", "echo": {"message": "hi"}, "data": {"__type__": "datetime", "__value__": 1}}
        embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
        bodies: tuple[Any, ...] = ([[], {"spec": portable(spec)}, embed], [[1], {}, embed], [[], {}, None], [], {})
        self.bodies = bodies
        self.seeds = [self._message(body) for body in bodies]
        keys = ("body", "headers", "properties", "delivery_info", "id", "spec", "__type__", "__value__", "compression")
        return Mutator(
            [as_json(seed) for seed in self.seeds], words=(b'"body": ', b"W10=", b"e30=", b"===="), keys=keys
        )

    def make(self, rng: random.Random) -> bytes:
        kind = rng.randrange(3)
        if kind == 0:
            return super().make(rng)
        if kind == 1:
            return as_json(self.mutator.tree(rng, rng.choice(self.seeds)))
        body = self.mutator.tree(rng, rng.choice(self.bodies))
        raw = json.dumps(body).encode()
        if rng.random() < 0.2:
            raw = raw[: rng.randrange(len(raw) + 1)]
        return as_json({**self._message([]), "body": base64.b64encode(raw).decode()})

    def read(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        message, hints = read_message(text)
        hints_text(hints)
        if not is_readable(message):
            return
        args, kwargs, embed = arguments(message)
        assert isinstance(args, list) and isinstance(kwargs, dict) and isinstance(embed, dict)
        run = run_message(message, "run-1", None)
        control_message(message, "gpuflow.control")
        again = read_message(dumps(run))[0]
        assert arguments(again)[:2] == (args, kwargs), "a run has other arguments than its caller"


class Values(Reader):
    """Users' values on Celery's wire: what arrives is what was sent."""

    name = "values on the wire"

    _SEEDS: tuple[Any, ...] = (
        {"a": [1, 2.5, None, True, "x"], "b": {"__type__": "datetime", "__value__": "x"}},
        [{"__type__": "gpuflow.mapping", "__value__": [["a", 1]]}, {"__type__": 1, "__value__": {"__type__": 2}}],
        {"text": "\ud83d", "pair": "\ud83d\ude00", "\udc00": 1},
    )

    def made_of(self) -> Mutator:
        keys = ("__type__", "__value__", "a", "b")
        words = (b'"__type__"', b'"__value__"', b'{"__type__": "x", "__value__": ', b"\\ud83d", b"gpuflow.mapping")
        return Mutator([as_json(seed) for seed in self._SEEDS], words=words, keys=keys)

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return super().make(rng)
        return as_json(self.mutator.tree(rng, rng.choice(self._SEEDS)))

    def read(self, data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        text = dumps(portable(value))
        text.encode()
        got = loads(text)
        assert json.dumps(got) == json.dumps(_whole(value)), "a value changes on the wire"
        entry = {"attempt": 1, "worker": "w", "startedAt": 1, "endedAt": 2, "outcome": "lost", "error": value}
        AttemptEntry.from_json(json.dumps(entry)).public()


def _whole(value: Any) -> Any:
    """Return a value as UTF-8 can hold it."""
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


__all__ = ["ChildLines", "Messages", "Values"]
