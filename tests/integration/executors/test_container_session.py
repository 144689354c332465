"""The engine of container sessions by itself: aborts that are not followed, lines that are of no request, and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executors.base import ExecutorError
from executors.containers import session
from executors.containers.session import ContainerSessionEngine
from executors.sessions.engine import EngineDied
from executors.sessions.lines import Open
from gpuflow.protocol import Emitter, Request
from gpuflow.settings import Settings
from gpuflow.worker.containers.local import local_container
from tests.support.waiting import eventually, patient

BEGIN = """
import json, os, sys, threading
def tell(event, **data):
    print(json.dumps({"event": event, **data}), flush=True)
def read():
    return json.loads(sys.stdin.readline() or "null")
tell("worker", status="loading", pid=os.getpid())
"""
ANSWERS = "tell('ready')\nwhile told := read():\n    tell('finish', id=told['id'], status='completed')\n"


class Told(Emitter):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, name: str, /, **data: Any) -> None:
        self.events.append({"event": name, **data})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


class Machine:
    """A preset as a process on this machine, and the engine that runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = ContainerSessionEngine()
        self.told = Told()
        self.requests = 0

    def load(self, program: str, **preset: Any) -> None:
        (self.folder / "program.py").write_text(BEGIN + program)
        process = {"process": {"folder": str(self.folder)}, "command": ["python", "program.py"]}
        (self.folder / "mine.yaml").write_text(json.dumps({"image": "a:1", "mode": "session", **process, **preset}))
        self.engine.load(Open(spec=self.spec(None), engine="container", task_type="container"), self.told)

    def spec(self, request: Any) -> dict[str, Any]:
        settings = Settings(container_engine="none", container_presets=self.folder, state_dir=self.folder / "state")
        section = {"preset": "mine", "request": request or "none"}
        return local_container({"taskType": "container", "container": section}, settings)

    def ask(self, request: Any = 1, emitter: Emitter | None = None) -> Coroutine[Any, Any, dict[str, Any]]:
        self.requests += 1
        asked = Request(
            task_id=f"task-{self.requests}",
            task_type="container",
            spec=self.spec(request),
            output_dir=str(self.folder / f"out-{self.requests}"),
        )
        return self.engine.run(asked, emitter or Told())

    @property
    def pid(self) -> int:
        """The process, as it has said itself."""
        return int(next(event["pid"] for event in self.told.named("worker") if "pid" in event))

    def is_gone(self) -> bool:
        return not psutil.pid_exists(self.pid)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    if made.told.events:
        made.engine.close()
        assert made.is_gone()


def cancelled(asked: Coroutine[Any, Any, Any], when: Callable[[], bool]) -> None:
    """Begin a request, and cancel it as soon as `when` is true; it ends as a cancelled one."""

    async def begin() -> None:
        task = asyncio.create_task(asked)
        async with asyncio.timeout(patient(30)):
            while not when():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(begin())


def test_an_abort_that_is_not_followed_ends_the_container(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ABORT_SECONDS", 0.2)
    machine.load("tell('ready')\nread()\ntell('text', content='deaf')\nthreading.Event().wait()\n")
    emitter = Told()

    cancelled(machine.ask(emitter=emitter), lambda: bool(emitter.named("text")))

    with pytest.raises(EngineDied, match="did not end a request within"):
        machine.engine.check()
    eventually(machine.is_gone, what="its end")


def test_one_that_does_not_even_read_is_ended_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ABORT_SECONDS", 0.2)
    machine.load("tell('ready')\nthreading.Event().wait()\n")

    cancelled(machine.ask("x" * 4_000_000), lambda: machine.engine.running == 1)

    eventually(machine.is_gone, what="its end")


def test_an_abort_that_is_followed_ends_nothing_else(machine: Machine) -> None:
    machine.load(
        "tell('ready')\ntell('text', content='begun') if (first := read()) else None\n"
        "assert read() == {'op': 'abort', 'id': first['id']}\n"
        "tell('finish', id=first['id'], status='cancelled')\n" + ANSWERS
    )
    emitter = Told()

    cancelled(machine.ask(emitter=emitter), lambda: bool(emitter.named("text")))

    machine.engine.check()
    assert asyncio.run(machine.ask())["ran_as"] == "process"


def test_lines_of_another_request_are_of_none(machine: Machine) -> None:
    machine.load(
        "tell('ready')\ntold = read()\ntell('finish', id='another', status='failed', error={'message': 'no'})\n"
        "tell('result', id=['x'], value=1)\ntell('ready')\ntell('closing')\ntell('text', content='mine')\n"
        "tell('result', value={'rows': 2})\ntell('finish', status='completed')\nread()\n"
    )
    emitter = Told()

    assert asyncio.run(machine.ask(emitter=emitter))["rows"] == 2
    assert emitter.named("text") == [{"event": "text", "content": "mine"}]
    assert machine.told.named("closing") == []


def test_no_event_but_the_load_reaches_the_session(machine: Machine) -> None:
    machine.load(
        "tell('closing')\ntell('error', error={})\ntell('pong', n=1)\ntell('progress', current=1, total=2)\n" + ANSWERS
    )

    assert {event["event"] for event in machine.told.events} == {"worker", "progress"}


def test_what_it_says_when_nobody_asks_does_not_stop_it(machine: Machine) -> None:
    machine.load("tell('ready')\nfor _ in range(300):\n    print('x' * 1000, flush=True)\n" + ANSWERS)

    assert asyncio.run(machine.ask())["ran_as"] == "process"


def test_requests_wait_for_their_turn(machine: Machine) -> None:
    machine.load("tell('ready')\nwhile told := read():\n    tell('finish', id=told['id'], status='completed')\n")

    async def many() -> list[dict[str, Any]]:
        return await asyncio.gather(*(machine.ask(n) for n in range(20)))

    assert len(asyncio.run(many())) == 20


def test_one_that_ends_between_two_requests_is_seen_before_the_next(machine: Machine) -> None:
    machine.load("tell('ready')\ntold = read()\ntell('finish', id=told['id'], status='completed')\nsys.exit(3)\n")
    asyncio.run(machine.ask())
    eventually(machine.is_gone, what="its end")

    with pytest.raises(EngineDied, match="ended with exit code 3"):
        eventually(machine.engine.check)


@pytest.mark.parametrize(
    ("program", "error", "says"),
    [
        ("sys.exit(0)", "NoFinish", "without `finish`"),
        ("print('no such model', file=sys.stderr)\nsys.exit(4)", "ContainerFailed", "no such model"),
        ("tell('finish', status='failed', error={'type': 'NoModel', 'message': 'gone'})", "NoModel", "gone"),
        ("os.kill(os.getpid(), 9)", "ContainerKilled", "SIGKILL"),
        ("threading.Event().wait()", "TimeLimitExceeded", "was not ready after 1 s"),
    ],
)
def test_one_that_does_not_become_ready(machine: Machine, program: str, error: str, says: str) -> None:
    with pytest.raises(ExecutorError, match=says) as caught:
        machine.load(program + "\n", timeout="1s")

    assert caught.value.type == error
    assert machine.is_gone()


def test_one_that_says_it_is_done_for_a_request_but_was_cancelled_by_nobody_fails(machine: Machine) -> None:
    machine.load("tell('ready')\ntold = read()\ntell('finish', id=told['id'], status='cancelled')\nread()\n")

    with pytest.raises(ExecutorError, match="says 'cancelled' of a request") as caught:
        asyncio.run(machine.ask())
    assert caught.value.type == "ContainerFailed"
