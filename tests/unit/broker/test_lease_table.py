"""The leases of a process while the server is away: what has ended is told later, what has not begun is not run."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gpuflow.broker.gate import OpenGate
from gpuflow.broker.keys import Keys
from gpuflow.broker.lease import Lease
from gpuflow.broker.lease_table import OWED_SECONDS, LeaseTable
from gpuflow.outages import Outage
from gpuflow.signatures import SignatureRefused


class Server:
    """Takes settle steps while it is there; `settled` are (tag, how)."""

    def __init__(self) -> None:
        self.away = False
        self.settled: list[tuple[str, str]] = []

    def evalsha(self, sha: str, numkeys: int, *values: Any) -> int:
        if self.away:
            raise RedisConnectionError("away")
        tag, _, how = values[numkeys : numkeys + 3]
        self.settled.append((tag, how))
        return 1


class Slots(OpenGate):
    """Notes which tags were given back."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    def on_lease_ended(self, tag: str) -> bool:
        self.given_back.append(tag)
        return False


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def table(server: Server) -> LeaseTable:
    made = LeaseTable(Keys(), 60.0, owner="me")
    made.gate = Slots()
    made.connect(server, keep=False)  # type: ignore[arg-type]
    return made


def test_an_end_that_could_not_be_told_is_told_when_the_server_is_back(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.start("a")
    server.away = True

    table.settle_or_defer("a", "ack")

    assert table.gate.given_back == ["a"], "what it used is free at once"  # type: ignore[attr-defined]
    assert table.holds("a")
    with pytest.raises(RedisConnectionError):
        table.settle_deferred()
    assert table.release_unstarted() == 0
    server.away = False
    table.settle_deferred()
    table.settle_deferred()
    assert server.settled == [("a", "ack")]
    assert not table.holds("a")


def test_an_end_is_told_at_once_when_the_server_is_there(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.settle_or_defer("a", "front")
    table.settle_deferred()

    assert server.settled == [("a", "front")]


def test_a_message_that_is_being_put_back_does_not_begin(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.accept("b", "queue")
    assert table.start("b")
    begun: list[bool] = []
    evalsha = server.evalsha

    def late(*arguments: Any) -> int:
        begun.append(table.start("a"))
        return evalsha(*arguments)

    server.evalsha = late  # type: ignore[method-assign]
    assert table.release_unstarted() == 1

    assert begun == [False]
    assert server.settled == [("a", "front")]
    assert table.holds("b")


def test_an_end_that_nobody_tells_puts_the_message_back_after_a_term(
    table: LeaseTable, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("gpuflow.broker.lease_table.time.monotonic", lambda: now[0])
    for tag in ("told", "dropped", "at work"):
        table.accept(tag, "queue")
        table.start(tag)
    table.over("told"), table.over("dropped")
    table.settle_or_defer("told", "ack")
    table.settle_deferred()
    assert server.settled == [("told", "ack")]

    now[0] += table.lease_seconds + 1
    table.settle_deferred()
    assert len(server.settled) == 1, "Celery's loop may be away, and tells it when it is back"
    table.tick()
    table.settle_deferred()

    assert server.settled == [("told", "ack"), ("dropped", "front")]
    assert list(table.held()) == ["at work"]


@pytest.mark.parametrize("lease_seconds", [0.5, 1.0, 2.0, 3.0, 3.1, 4.0, 5.0, 7.0, 60.0])
def test_no_two_renewals_are_further_apart_than_a_third_of_the_term(
    monkeypatch: pytest.MonkeyPatch, lease_seconds: float
) -> None:
    now = [1000.0]
    renewed: list[float] = []
    table = LeaseTable(Keys(), lease_seconds, owner="me")

    def paused(seconds: float) -> bool:
        now[0] += seconds
        return now[0] > 1000 + 10 * lease_seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(table, "_paused", paused)
    monkeypatch.setattr(table, "_renew", lambda: renewed.append(now[0]))
    monkeypatch.setattr(table, "reaffirm", lambda **_: None)

    table._keep()

    assert len(renewed) >= 30
    assert max(after - before for before, after in itertools.pairwise(renewed)) <= lease_seconds / 3 + 1e-6


def test_the_keeper_comes_when_a_delayed_message_is_due_also_if_a_turn_came_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given that the sweep at 1000 says to come again in 0.6 s, and that the keeper is woken after 0.2 s
    now, turns = [1000.0], []
    table = LeaseTable(Keys(), 60, owner="me")
    wakes = iter([0.0, 0.2])

    def paused(seconds: float) -> bool:
        now[0] += next(wakes, seconds)
        return len(turns) == 4

    def swept(*, next_seconds: float) -> float | None:
        turns.append(round(now[0], 3))
        return 0.6 if len(turns) == 1 else None

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(table, "_paused", paused)
    monkeypatch.setattr(table, "_renew", lambda: None)
    monkeypatch.setattr(table, "reaffirm", swept)

    table._keep()

    assert turns == [1000.0, 1000.2, 1000.601, 1001.601]


# -- a message that is here already -------------------------------------------------------------------------------


def test_a_message_that_comes_while_it_is_requeued_waits_for_the_end_of_its_earlier_delivery(
    table: LeaseTable, server: Server
) -> None:
    table.accept("a", "queue")
    table.start("a")
    earlier = table.delivery("a")
    table.requeueing("a")

    assert not table.accept("a", "queue")  # popped again before the supervisor has heard that it is requeued
    assert server.settled == [("a", "front")]
    assert table.delivery("a") == earlier

    table.forget("a")
    assert not table.accept("a", "queue")  # the lease is over, what runs here is not
    assert not table.holds("a")

    table.over("a")
    assert table.accept("a", "queue")
    assert table.delivery("a") not in (None, earlier)


def test_what_a_sweep_took_from_a_delivery_at_work_is_its_own_again(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.start("a")
    earlier = table.delivery("a")

    assert not table.accept("a", "queue")

    assert table.delivery("a") == earlier
    assert server.settled == []


def test_what_nobody_supervises_any_more_is_left_to_other_workers(
    table: LeaseTable, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.accept("a", "queue")
    table.start("a")
    table.beat("a")
    later = time.monotonic() + table.lease_seconds + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)

    assert not table.accept("a", "queue")

    assert server.settled == [("a", "front")]


def test_what_ended_while_the_server_was_away_is_told_when_it_comes_again(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.start("a")
    server.away = True
    table.settle_or_defer("a", "ack")
    server.away = False

    assert not table.accept("a", "queue")

    assert server.settled == [("a", "ack")]


def test_a_server_that_cannot_be_told_of_an_early_message_ends_nobody(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.start("a")
    table.requeueing("a")
    server.away = True

    assert not table.accept("a", "queue")


def test_work_begins_for_the_delivery_that_it_was_meant_for(table: LeaseTable) -> None:
    table.accept("a", "queue")
    earlier = table.delivery("a")
    table.accept("a", "queue")

    assert not table.start("a", delivery=earlier)
    assert table.start("a", delivery=table.delivery("a"))


def test_a_message_that_has_not_begun_can_come_again(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    earlier = table.delivery("a")

    assert table.accept("a", "queue")

    assert table.delivery("a") not in (None, earlier)


def test_a_stuck_loop_is_said_once_and_not_where_the_broker_is_away(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gpuflow.broker.lease_table.log.error", lambda event, **_: said.append(event))
    missing = Outage(lambda *_, **__: None)
    monkeypatch.setattr("gpuflow.broker.lease_table.outage", missing)
    table._ticked_at = time.monotonic() - 2 * table.lease_seconds

    missing.symptom("away")
    table._renew()
    assert said == []
    missing.over()
    table._renew()
    table._renew()
    assert said == ["consumer_loop_stuck"]
    table.tick()
    table._renew()
    table._ticked_at = time.monotonic() - 2 * table.lease_seconds
    table._renew()
    assert said == ["consumer_loop_stuck"] * 2, "another time that it is stuck"


def test_what_ends_with_the_next_pop_gives_its_place_back_at_once_and_is_told_by_the_keeper_if_none_comes(
    table: LeaseTable, server: Server
) -> None:
    for tag in ("a", "b"):
        table.accept(tag, "queue", returned="7.5")
        table.start(tag)

    owed = table.owe_ack("a")
    assert owed is not None
    assert (owed[0].returned, owed[1]) == ("7.5", False)
    assert table.owe_ack("unknown") is None

    assert table.gate.given_back == ["a"]  # type: ignore[attr-defined]
    assert table.release_unstarted() == 0, "it is done, and not to be run again"
    assert server.settled == []
    table.settle_deferred()
    assert server.settled == [("a", "ack")]
    assert list(table.held()) == ["b"]


def test_a_lease_that_was_lost_before_its_end_is_told_of_unless_the_keeper_has_ended_it(
    table: LeaseTable, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in ("lost", "told", "done"):
        table.accept(tag, "queue")
        table.start(tag)
        table.owe_ack(tag)
    leases = table.held()
    table.settle("told", "ack")

    table.acknowledged("done", leases["done"], was_lost=False)
    table.acknowledged("told", leases["told"], was_lost=True)
    table.acknowledged("lost", Lease(queue="queue"), was_lost=True)
    assert "lease_lost" not in caplog.text
    assert table.holds("lost"), "it is another delivery"
    table.acknowledged("lost", leases["lost"], was_lost=True)

    assert caplog.text.count("lease_lost") == 1
    assert table.held() == {}


def test_what_the_next_pop_ends_is_left_to_it_for_a_moment(table: LeaseTable, server: Server) -> None:
    table.accept("a", "queue")
    table.start("a")
    table.owe_ack("a")

    table.settle_deferred(OWED_SECONDS)
    assert server.settled == []

    table.held()["a"].owed_at -= OWED_SECONDS
    table.settle_deferred(OWED_SECONDS)
    assert server.settled == [("a", "ack")]


def test_an_end_that_comes_late_leaves_the_next_delivery_alone(
    table: LeaseTable, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    table.accept("a", "queue")
    table.start("a")
    table.owe_ack("a")
    table.over("a")
    earlier = table.held()["a"]

    def while_the_pop_ends_it(*arguments: Any) -> int:
        table.acknowledged("a", earlier, was_lost=False)
        table.accept("a", "queue", returned="8")
        return 0

    server.evalsha = while_the_pop_ends_it  # type: ignore[method-assign]
    table.settle_deferred()

    assert table.held()["a"].returned == "8"
    assert "lease_lost" not in caplog.text


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), RedisConnectionError("away")])
def test_a_refused_message_ends_nobody_whatever_comes_of_telling_its_task(
    table: LeaseTable, server: Server, error: Exception
) -> None:
    class Refusing:
        def check(self, raw: bytes, queue: str) -> None:
            """Never asked here."""

        def refused(self, task_id: str, error_: SignatureRefused, raw: bytes) -> None:
            raise error

    table.checker = Refusing()
    table.refuse("a", "task", SignatureRefused("forged", "it does not fit"), b"{}", "0")

    put_aside = not isinstance(error, RedisConnectionError)  # the sweep brings it again
    assert server.settled == ([("a", "it does not fit")] if put_aside else [])
