"""Warm sessions of one worker, without broker and GPUs: real processes that speak the protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.protocol import FUNCTION_TYPE, Request
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.outcome import HandedBack
from gpuflow.worker.sessions import keeper
from gpuflow.worker.sessions.entry import LOADING_PLACES, SessionEntry
from gpuflow.worker.sessions.keeper import Keeper
from gpuflow.worker.sessions.logs import KEPT, new_log
from gpuflow.worker.sessions.opening import Opening
from gpuflow.worker.sessions.process import FUNCTION_ABORT_SECONDS, Told
from gpuflow.worker.sessions.request import SessionRequest
from gpuflow.worker.sessions.table import Sessions
from tests.support.engines import scripted
from tests.support.waiting import eventually


class Pool:
    """Sessions, and what they have given back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.released: list[Hold] = []
        #: The names of the sessions that had room, each time that somebody was told to look.
        self.told: list[tuple[str, ...]] = []
        self.sessions = Sessions(
            idle_seconds=3600,
            log_dir=folder / "logs",
            log_max_bytes=1 << 20,
            release=self.released.append,
            on_change=lambda: self.told.append(self.sessions.names()),
        )

    def ask(self, tag: str, prompt: str, opening: Opening | None = None, *, alone: bool = False) -> SessionRequest:
        spec = {"data": {"items": [prompt]}}
        request = Request(task_id=tag, task_type="inference", spec=spec, output_dir=str(self.folder))
        return self.sessions.ask(tag, request, opening or scripted(), alone=alone)

    def only(self) -> SessionEntry:
        (entry,) = self.sessions._look()
        return entry


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    for entry in made.sessions._look():
        for tag in list(entry.places):
            made.sessions.leave(tag)
    made.sessions.stop(5)
    eventually(lambda: not made.sessions._look(), what="all sessions end")


def finish(asked: SessionRequest) -> dict[str, Any]:
    """Return the finish event of a request, with its result."""
    found: dict[str, Any] = {}
    for kind, line in asked.read(10):
        if kind == "event":
            event = json.loads(line)
            found |= event if event["event"] == "finish" else {"value": event.get("value")}
    return found


def ready(pool: Pool) -> SessionEntry:
    entry = pool.only()
    eventually(lambda: entry.session is not None and entry.session.state == "ready", what="it is loaded")
    return entry


def test_whoever_comes_first_begins_it_and_it_has_the_gpus_from_the_start(pool: Pool) -> None:
    hold = Hold(("GPU-0",))
    pool.sessions.expect("s", "a", hold, None)
    assert pool.sessions.join("s", "b")
    assert pool.sessions.hold_of("b") is hold

    second = finish(pool.ask("b", "echo b"))
    first = finish(pool.ask("a", "echo a"))

    assert first["value"]["pid"] == second["value"]["pid"]
    assert pool.sessions.loads == 1
    pool.sessions.leave("a")
    pool.sessions.leave("b")
    assert pool.released == [], "it stays warm"
    pool.sessions.close_all()
    eventually(lambda: pool.released == [hold], what="it gives its GPU back")


def test_one_that_its_opener_leaves_is_begun_by_another(pool: Pool) -> None:
    hold = Hold(("GPU-0",))
    pool.sessions.expect("s", "opener", hold, None)
    assert pool.sessions.join("s", "other")
    pool.sessions.leave("opener")

    assert pool.released == []
    assert finish(pool.ask("other", "echo x"))["status"] == "completed"


def test_one_that_nobody_begins_gives_its_gpus_back(pool: Pool) -> None:
    hold = Hold(("GPU-0",))
    pool.sessions.expect("s", "a", hold, None)
    pool.sessions.leave("a")

    assert pool.released == [hold]
    assert pool.sessions.here() == ()
    with pytest.raises(HandedBack, match="has ended"):
        pool.ask("a", "echo a")


def test_where_it_cannot_be_begun_nothing_is_kept(pool: Pool) -> None:
    (pool.folder / "logs").write_text("no folder")
    hold = Hold(("GPU-0",))
    pool.sessions.expect("s", "a", hold, None)

    with pytest.raises(OSError, match="logs"):
        pool.ask("a", "echo a")

    pool.sessions.leave("a")
    assert pool.released == [hold]


def test_other_variables_get_another_session_and_cost_no_attempt(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    running = pool.ask("a", f"wait {pool.folder / 'go'}")
    assert pool.sessions.join("s", "b")

    with pytest.raises(HandedBack, match="variables or secrets"):
        pool.ask("b", "echo b", scripted("other"))

    pool.sessions.leave("b")
    assert not pool.sessions.join("s", "c"), "it takes nobody in any more"
    assert pool.sessions.here() == ()
    (pool.folder / "go").touch()
    assert finish(running)["status"] == "completed", "who is in is answered"
    pool.sessions.leave("a")
    eventually(lambda: not pool.sessions._look(), what="it ends with the last of them")


def test_one_that_answers_in_turn_has_one_place(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None, in_turn=True)
    assert not pool.sessions.join("s", "b"), "while it loads, too"
    assert pool.sessions.full() == ("s",)
    finish(pool.ask("a", "echo a"))
    ready(pool)
    assert not pool.sessions.join("s", "b")

    pool.sessions.leave("a")

    assert pool.sessions.join("s", "b")
    assert not pool.sessions.join("s", "c")


def test_one_that_is_too_old_answers_what_it_has_and_nothing_more(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    running = pool.ask("a", f"wait {pool.folder / 'go'}", scripted(LIFETIME_SECONDS="0.01"))
    entry = ready(pool)
    eventually(lambda: entry.is_too_old(time.monotonic()), what="its age")

    pool.sessions.keeper.look()

    assert not pool.sessions.join("s", "b")
    (pool.folder / "go").touch()
    assert finish(running)["status"] == "completed"
    pool.sessions.leave("a")
    eventually(lambda: not pool.sessions._look(), what="it ends with its last request")


def test_the_idle_time_that_a_session_says_stands_in_place_of_the_workers(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "echo a", scripted(IDLE_SECONDS="0.05")))
    pool.sessions.leave("a")

    def ended() -> bool:
        pool.sessions.keeper.look()
        return not pool.sessions._look()

    eventually(ended, what="its end")


def test_a_drain_answers_those_that_have_a_place(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "echo a"))
    assert pool.sessions.join("s", "b")
    pool.sessions.leave("a")

    pool.sessions.close_all()

    assert not pool.sessions.join("s", "c")
    assert finish(pool.ask("b", "echo b"))["status"] == "completed"
    pool.sessions.leave("b")
    eventually(lambda: not pool.sessions._look(), what="it ends")


def test_a_session_that_dies_says_how_and_where_its_log_is(pool: Pool) -> None:
    hold = Hold(("GPU-0",))
    pool.sessions.expect("s", "a", hold, None)
    asked = pool.ask("a", "die")

    error = finish(asked)["error"]

    assert (error["type"], error["retryable"]) == ("EngineDied", True)
    assert "signal SIGKILL" in error["message"]
    (log,) = (pool.folder / "logs").glob("*.log")
    assert str(log) in error["message"]
    eventually(lambda: pool.released == [hold], what="it gives its GPU back")


def test_requests_that_die_with_others_are_told_apart_from_one_that_dies_alone(pool: Pool) -> None:
    gate = pool.folder / "go"
    pool.sessions.expect("s", "a", None, None)
    for tag in "bc":
        pool.sessions.join("s", tag)
    asked = [pool.ask("a", f"wait {gate}"), pool.ask("b", f"wait {gate}")]
    ready(pool)
    asked.append(pool.ask("c", "die"))
    assert [finish(one)["error"]["type"] for one in asked] == ["EngineDied"] * 3
    assert [one.wait().beside for one in asked] == [2, 2, 2]

    eventually(lambda: not pool.sessions._look(), what="it ends")
    pool.sessions.expect("s", "d", None, None)
    alone = pool.ask("d", "die", alone=True)
    assert alone.alone
    assert finish(alone)["error"]["type"] == "EngineDied"
    assert alone.wait().beside == 0


def test_one_that_is_to_be_alone_waits_for_the_others_and_they_for_it(pool: Pool) -> None:
    first, second = pool.folder / "first", pool.folder / "second"
    pool.sessions.expect("s", "a", None, None)
    for tag in "bcd":
        pool.sessions.join("s", tag)
    open_one = pool.ask("a", f"wait {first}")
    session = ready(pool).session
    assert session is not None
    alone = pool.ask("b", f"wait {second}", alone=True)
    later, last = pool.ask("c", "echo c"), pool.ask("d", "echo d")
    assert [asked.id for asked in session._in_engine()] == [open_one.id]

    eventually(lambda: alone.held_up_seconds > open_one.held_up_seconds, what="the time that it waits")
    last.terminate()
    assert finish(last)["status"] == "cancelled"
    first.touch()
    assert finish(open_one)["status"] == "completed"
    eventually(lambda: [asked.id for asked in session._in_engine()] == [alone.id], what="it has the engine for itself")

    second.touch()
    assert finish(alone)["status"] == "completed"
    assert finish(later)["value"]
    assert session.running == 0


def test_what_has_not_been_sent_is_no_culprit(pool: Pool) -> None:
    gate = pool.folder / "go"
    pool.sessions.expect("s", "a", None, None)
    for tag in "bc":
        pool.sessions.join("s", tag)
    culprit, waiting = pool.ask("a", f"wait {gate}", alone=True), pool.ask("b", "echo b")
    session = ready(pool).session
    assert session is not None
    session.kill("a test")

    assert finish(culprit)["error"]["type"] == finish(waiting)["error"]["type"] == "EngineDied"
    assert (culprit.wait().beside, waiting.wait().beside) == (0, 1)


def test_requests_that_somebody_elses_signal_ends_are_tried_again(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    asked = pool.ask("a", "cancelled")

    error = finish(asked)["error"]

    assert (error["type"], error["retryable"]) == ("EngineDied", True)


def test_a_cancel_of_our_own_is_one(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    asked = pool.ask("a", f"wait {pool.folder / 'never'}")
    ready(pool)

    asked.terminate()

    assert finish(asked)["status"] == "cancelled"


def test_garbage_between_the_events_ends_nothing(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)

    done = finish(pool.ask("a", "garbage"))

    assert done["status"] == "completed"
    entry = pool.only()
    assert entry.session is not None and entry.session.state == "ready"


def test_half_a_character_does_not_keep_it_from_idling(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)

    assert finish(pool.ask("a", "echo \ud800"))["status"] == "completed"

    pool.sessions.leave("a")
    assert pool.only().is_idle()


def test_its_log_hides_secrets(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "log the topsecret"))
    (log,) = (pool.folder / "logs").glob("*.log")
    eventually(lambda: "the ***" in log.read_text(), what="the line is there")


def test_a_load_that_nobody_waits_for_can_be_ended(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    pool.ask("a", "echo a", scripted(LOADS_AFTER=str(pool.folder / "never")))
    entry = pool.only()
    assert not entry.is_idle()

    for asked in list(entry.session._open.values()):  # type: ignore[union-attr]
        asked.terminate()
    pool.sessions.leave("a")
    entry.session._open.clear()  # type: ignore[union-attr]

    assert entry.is_idle()
    assert pool.sessions.idle() == [entry]


def test_places_end_where_the_engine_ends(pool: Pool) -> None:
    pool.sessions.expect("s", "0", None, None)
    assert [pool.sessions.join("s", str(n)) for n in range(1, LOADING_PLACES + 1)] == [True] * 7 + [False]
    assert pool.sessions.full() == ("s",)

    pool.ask("0", "echo x")
    ready(pool)

    assert pool.sessions.names() == (), "it answers four at once and has more"
    for n in range(1, LOADING_PLACES):
        pool.sessions.leave(str(n))
    assert pool.sessions.names() == ("s",)
    assert pool.sessions.names(idle=False) == ("s",)
    pool.sessions.leave("0")
    assert pool.sessions.names(idle=False) == ()


def test_that_a_session_takes_more_is_told_at_once(pool: Pool) -> None:
    def says(places: int) -> str:
        return f"""do import os; os.write(1, b'{{"event": "places", "max_requests": {places}}}\\n')"""

    pool.sessions.expect("s", "0", None, None, loading_places=1)
    pool.ask("0", "echo x")
    eventually(lambda: pool.told[-1:] == [("s",)], what="it is told that it is ready, and has three places more")
    for n in range(1, 4):
        assert pool.sessions.join("s", str(n))
    pool.told.clear()

    finish(pool.ask("1", says(9)))

    eventually(lambda: pool.told == [("s",)], what="it is told of five more")
    finish(pool.ask("2", says(8)))
    finish(pool.ask("3", says(9)))
    eventually(lambda: len(pool.told) > 1, what="it is told of one more")
    assert pool.told == 2 * [("s",)], "of fewer there is nothing to tell"


def test_one_that_seems_to_hang_gets_no_more_requests(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "echo a"))
    entry = ready(pool)
    now = time.monotonic()

    assert entry.has_place(now)
    assert not entry.has_place(now + 3600), "it has said nothing for an hour"


def test_a_call_that_waits_behind_another_one_ends_no_process(pool: Pool) -> None:
    """A function that keeps the interpreter to itself answers no abort as long as the first call works."""

    def call(tag: str, prompt: str) -> SessionRequest:
        spec = {"data": {"items": [prompt]}}
        request = Request(task_id=tag, task_type=FUNCTION_TYPE, spec=spec, output_dir=str(pool.folder))
        return pool.sessions.ask(tag, request, replace(scripted(), of_function=True))

    works = json.dumps({"event": "worker", "id": "a#1", "status": "working"})
    pool.sessions.expect("s", "a", None, None)
    assert pool.sessions.join("s", "b")
    first = call("a", f"do import os, time; os.write(1, {works.encode()!r} + bytes([10])); time.sleep(3600)")
    session = ready(pool).session
    assert session is not None
    eventually(lambda: first.works, what="the first one is worked on")
    call("b", "wait for ever").kill()

    assert not session.disobeys(time.monotonic() + 3600), "that one waits"

    first.kill()
    assert session.disobeys(time.monotonic() + FUNCTION_ABORT_SECONDS + 1)
    session.kill("it stands still")


def test_one_that_says_that_it_dies_takes_nobody_in(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, None)

    assert finish(pool.ask("a", "closing"))["status"] == "completed"

    assert not pool.sessions.join("s", "b")
    pool.sessions.close_all()
    pool.sessions.leave("a")
    eventually(lambda: not pool.sessions._look(), what="it can still be closed")


def test_the_keeper_ends_what_is_silent_and_survives_what_goes_wrong(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.sessions.expect("s", "a", None, None)
    asked = pool.ask("a", "freeze")
    entry = pool.only()
    eventually(lambda: _is_stopped(entry), what="it is stopped")
    monkeypatch.setattr(keeper, "SILENT_SECONDS", 0.2)
    calls = 0

    def broken() -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("of a test")

    monkeypatch.setattr(pool.sessions.keeper, "on_idle", broken)

    error = finish(asked)["error"]

    assert "said nothing" in error["message"]
    pool.sessions.leave("a")
    pool.sessions.expect("s", "b", None, None)
    finish(pool.ask("b", "echo b"))
    pool.sessions.leave("b")
    monkeypatch.setattr(keeper, "SILENT_SECONDS", 60)
    eventually(lambda: calls >= 2, what="the keeper looks on")


def _is_stopped(entry: SessionEntry) -> bool:
    session = entry.session
    if session is None:
        return False
    found = psutil.Process(session.shim_pid).children(recursive=True)
    return any(one.status() == psutil.STATUS_STOPPED for one in found)


def test_one_that_is_closed_and_does_not_end_is_ended(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "deaf"))
    pool.sessions.leave("a")
    monkeypatch.setattr(keeper, "CLOSE_SECONDS", 0.1)

    pool.sessions.evict(pool.sessions.idle(), why="a test")

    eventually(lambda: not pool.sessions._look(), what="it is ended")
    assert pool.sessions.evictions == 1


def test_idle_ones_are_closed_by_the_keeper(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.sessions.keeper = Keeper(pool.sessions._look, pool.sessions._close_idle, pool.sessions._retire, 0.1)
    pool.sessions.expect("s", "a", None, None)
    finish(pool.ask("a", "echo a"))
    pool.sessions.leave("a")

    eventually(lambda: not pool.sessions._look(), what="it is closed")
    pool.sessions.stop(1)


def test_what_sessions_keep_and_use(pool: Pool) -> None:
    pool.sessions.expect("s", "a", None, Requirement(cpu=2, memory_mib=1000))
    pool.sessions.expect("t", "b", Hold(("GPU-1",)), Requirement(memory_mib=500))

    assert [one.cpu for one in pool.sessions.working()] == [2, None]
    assert pool.sessions.memory_mib() == 1500
    assert pool.sessions.tags_on("GPU-1") == ["b"]
    first = pool.sessions._look()[0]
    assert pool.sessions.memory_mib([first]) == 500
    pool.sessions.leave("a")
    pool.sessions.leave("b")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"model": 7, "max_requests": "many", "load_seconds": None}, Told(model="7")),
        ({"max_requests": 0, "load_seconds": -3}, Told()),
        ({"engine": "vllm", "max_requests": 10**9}, Told(engine="vllm", max_requests=100_000)),
    ],
)
def test_what_it_tells_of_itself_is_read_with_care(event: dict[str, Any], told: Told) -> None:
    assert Told.read(event) == told


def test_the_logs_that_are_kept_are_few(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        (tmp_path / f"20260101-000000-{number:04}-m.log").touch()

    path = new_log(tmp_path, "m")

    assert path.parent == tmp_path
    assert len(list(tmp_path.glob("*.log"))) == KEPT
