"""The leases of a process while the server is away: what has ended is told later, what has not begun is not run."""

from __future__ import annotations

import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gpuflow.broker.gate import OpenGate
from gpuflow.broker.keys import Keys
from gpuflow.broker.leases import LeaseTable


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

    def settled(self, tag: str) -> bool:
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
    table.take("a", "queue")
    table.start("a")
    server.away = True

    table.settle_surely("a", "ack")

    assert table.gate.given_back == ["a"], "what it used is free at once"  # type: ignore[attr-defined]
    assert table.holds("a")
    with pytest.raises(RedisConnectionError):
        table.settle_owed()
    assert table.release_unstarted() == 0
    server.away = False
    table.settle_owed()
    table.settle_owed()
    assert server.settled == [("a", "ack")]
    assert not table.holds("a")


def test_an_end_is_told_at_once_when_the_server_is_there(table: LeaseTable, server: Server) -> None:
    table.take("a", "queue")
    table.settle_surely("a", "front")
    table.settle_owed()

    assert server.settled == [("a", "front")]


def test_a_message_that_is_being_put_back_does_not_begin(table: LeaseTable, server: Server) -> None:
    table.take("a", "queue")
    table.take("b", "queue")
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
    monkeypatch.setattr("gpuflow.broker.leases.time.monotonic", lambda: now[0])
    for tag in ("told", "dropped", "at work"):
        table.take(tag, "queue")
        table.start(tag)
    table.over("told"), table.over("dropped")
    table.settle_surely("told", "ack")
    table.settle_owed()
    assert server.settled == [("told", "ack")]

    now[0] += table.lease_seconds + 1
    table.settle_owed()
    assert len(server.settled) == 1, "Celery's loop may be away, and tells it when it is back"
    table.tick()
    table.settle_owed()

    assert server.settled == [("told", "ack"), ("dropped", "front")]
    assert list(table.held()) == ["at work"]
