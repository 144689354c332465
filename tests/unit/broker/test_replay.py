"""What is asked of a server before its append-only file is trusted to come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from gpuflow.broker import replay

REDIS = {"redis_version": "7.0.15"}


class Server:
    """Answers ACL DRYRUN for the user `default`; `denied` are commands that this user may not do."""

    def __init__(self, user: str | None, denied: frozenset[str] = frozenset(), error: str = "") -> None:
        self.connection_pool = SimpleNamespace(connection_kwargs={"username": user})
        self.denied, self.error = denied, error
        self.asked: list[tuple[Any, ...]] = []

    def execute_command(self, *words: str) -> str:
        self.asked.append(words)
        if self.error:
            raise redis.ResponseError(self.error)
        assert words[:3] == ("ACL", "DRYRUN", "default")
        return f"no permissions to run '{words[3]}'" if words[3] in self.denied else "OK"


def test_everything_may_be_done() -> None:
    server = Server("gpuflow")
    assert replay.left_out(server, REDIS, "t 1:") == ""
    assert {words[3] for words in server.asked} == {"EXEC", "SET", "HSET", "XADD", "ZADD", "LPUSH"}
    assert {words[4] for words in server.asked if len(words) > 4} == {"t 1:gpuflow.replay"}, (
        "one word, whatever is in it"
    )


@pytest.mark.parametrize("command", ["EXEC", "SET", "ZADD"])
def test_one_thing_that_may_not_be_done_is_told(command: str) -> None:
    assert command in replay.left_out(Server("gpuflow", frozenset({command})), REDIS, "")


@pytest.mark.parametrize("user", [None, "", "default"])
def test_who_is_the_default_user_asks_nothing(user: str | None) -> None:
    server = Server(user, error="not to be asked")
    assert replay.left_out(server, REDIS, "") == "" and not server.asked


def test_a_user_of_ours_may_not_ask_and_does_not_try() -> None:
    server = Server("gpuflow-client-ana", error="NOPERM")
    with pytest.raises(replay.CannotBeSeen):
        replay.left_out(server, REDIS, "")
    assert not server.asked, "each try would stand in the server's ACL LOG"


@pytest.mark.parametrize("error", ["NOPERM: acl/dryrun", "unknown subcommand 'DRYRUN'"])
def test_a_server_that_does_not_answer_it(error: str) -> None:
    with pytest.raises(replay.CannotBeSeen, match=error):
        replay.left_out(Server("gpuflow", error=error), {"redis_version": "6.2.14"}, "")


@pytest.mark.parametrize(("version", "asks"), [("9.1.2", False), ("9.2.0", False), ("9.1.1", True), ("8.0", True)])
def test_a_valkey_that_replays_everything_is_not_asked(version: str, asks: bool) -> None:
    server = Server("gpuflow", frozenset({"SET"}))
    assert bool(replay.left_out(server, {"redis_version": "7.2.4", "valkey_version": version}, "")) is asks
    assert bool(server.asked) is asks
