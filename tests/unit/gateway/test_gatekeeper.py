"""A right token gets in, whatever strangers behind its address send."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from pydantic import SecretStr
from starlette.requests import Request

from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.revocation import OpenRequests
from gpuflow.gateway.wrong_tokens import BURST, LOOKUP_BURST, WrongTokens
from gpuflow.settings import Settings
from gpuflow.tokens.rights import Grant, Role
from gpuflow.tokens.texts import Kind, TokenText, new_token

FLEETS = "the-token-of-this-fleet"
HERS = new_token(Kind.USER)


class Front:
    """A gatekeeper with a store of one token, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looked_up: list[str] = []
        settings = Settings(worker_token=SecretStr(FLEETS))
        self.keeper = Gatekeeper(settings, find=self._find, requests=OpenRequests(self._valid))
        self.keeper.wrong_tokens = WrongTokens(clock=lambda: self.now)

    async def _find(self, token: TokenText) -> Grant | None:
        self.looked_up.append(token.digest)
        if token.digest != HERS.digest:
            return None
        return Grant(role=Role.VIEWER, token_id=token.id, digest=token.digest, owner="ana")

    async def _valid(self, grants: Sequence[Grant]) -> list[bool]:
        return [True] * len(grants)

    async def send(self, token: str) -> Problem | None:
        request = Request(
            {
                "type": "http",
                "method": "GET",
                "path": "/api/v1/tasks",
                "query_string": b"",
                "headers": [(b"authorization", b"Bearer " + token.encode())],
                "client": ("192.0.2.9", 1),
                "route": SimpleNamespace(path="/api/v1/tasks"),
                "server": ("gateway", 80),
                "scheme": "http",
            }
        )
        try:
            await self.keeper(request)
        except Problem as problem:
            return problem
        return None

    async def flooded(self) -> None:
        """Send wrong tokens until the address is not heard."""
        for _ in range(int(BURST) + 1):
            problem = await self.send("a-token-of-a-stranger")
        assert problem is not None
        assert problem.status == 429


async def test_a_right_token_gets_in_where_a_stranger_has_sent_wrong_ones() -> None:
    front = Front()
    await front.flooded()

    assert await front.send(HERS.text) is None
    assert await front.send("a-token-of-a-stranger") is not None
    assert await front.send(HERS.text) is None


async def test_what_was_not_looked_up_is_not_counted_as_wrong() -> None:
    front = Front()
    await front.flooded()
    for _ in range(int(LOOKUP_BURST)):
        assert await front.send(new_token(Kind.USER).text) is not None
    front.keeper.wrong_tokens.take_unaudited()

    refused = [await front.send(HERS.text) for _ in range(10)]

    assert {one.status for one in refused if one is not None} == {429}
    assert len(front.looked_up) == LOOKUP_BURST, "lookups are bounded"
    assert front.keeper.wrong_tokens.take_unaudited() == {}
    front.now += float(refused[-1].headers["Retry-After"]) if refused[-1] is not None else 0
    assert await front.send(HERS.text) is None


async def test_the_time_to_wait_counts_the_token_that_is_answered() -> None:
    front = Front()
    await front.flooded()
    front.now += 1.9  # almost one token's time: it is given up by another wrong one
    problem = await front.send("a-token-of-a-stranger")

    assert problem is not None
    assert problem.headers["Retry-After"] == "2"


async def test_the_token_of_the_fleet_waits_as_before() -> None:
    front = Front()
    await front.flooded()
    problem = await front.send(FLEETS)
    assert problem is not None
    assert problem.status == 429
    front.now += 2
    assert await front.send(FLEETS) is None
