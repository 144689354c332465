"""When a sweep puts back what was leased, and when it gives one more term: the real Lua after gaps of any length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import broker_script
from gpuflow.broker.sweeper import Sweeper, Swept
from tests.support.fleet import Broker

KEYS = Keys("t:")
#: Moves the last sweep and the end of a lease back, in seconds before now.
SET_BACK = """
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', seconds - ARGV[1]))
redis.call('ZADD', KEYS[2], string.format('%.6f', seconds - ARGV[2]), 'tag')
"""


class AtOnce:
    """Sweeps in the same step in which the last sweep is set back: no moment passes between them."""

    def __init__(self, client: Any, gap_seconds: float) -> None:
        self.client = client
        self.gap_seconds = gap_seconds

    def evalsha(self, *arguments: Any) -> Any:
        pipe = self.client.pipeline(transaction=True)
        pipe.eval(SET_BACK, 2, KEYS.sweep, KEYS.leases, self.gap_seconds, 0.01)
        pipe.evalsha(*arguments)
        return pipe.execute()[-1]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(Path(tmp_path_factory.mktemp("broker")))
    try:
        yield made
    finally:
        made.close()


def swept(broker: Broker, *, lease_seconds: float, gap_seconds: float) -> Swept:
    """Sweep once with a lease that has just ended, so long after the last sweep."""
    sweeper = Sweeper(KEYS, lease_seconds)
    sweeper.sweep(broker.client)  # knows the server, and the server the script
    broker.client.hset(KEYS.unacked, "tag", json.dumps({"headers": {}}))
    broker.client.hset(KEYS.owners, "tag", "me\nt:cpu")
    return sweeper.sweep(AtOnce(broker.client, gap_seconds))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lease_seconds", "gap_seconds"), [(60, 5.1), (60, 600), (7.5, 5.1), (5, 3.4), (3, 2.1), (2, 2.1), (1, 2.1)]
)
def test_after_a_gap_in_which_nobody_could_renew_leases_get_grace(
    broker: Broker, lease_seconds: float, gap_seconds: float
) -> None:
    seconds, micros = broker.client.time()

    found = swept(broker, lease_seconds=lease_seconds, gap_seconds=gap_seconds)

    assert (found.graced, found.restored) == (1, 0)
    assert broker.client.zscore(KEYS.leases, "tag") >= seconds + micros / 1e6 + lease_seconds


@pytest.mark.parametrize(
    ("lease_seconds", "gap_seconds"), [(60, 4.9), (60, 1.0), (5, 3.3), (3, 1.9), (2, 1.4), (1, 1.0), (0.5, 1.0)]
)
def test_after_ordinary_turns_what_is_not_renewed_goes_back(
    broker: Broker, lease_seconds: float, gap_seconds: float
) -> None:
    found = swept(broker, lease_seconds=lease_seconds, gap_seconds=gap_seconds)

    assert (found.graced, found.restored) == (0, 1)
    assert broker.client.zscore(KEYS.leases, "tag") is None


def delay(broker: Broker, tag: str, seconds: float, **waiters: str) -> list[str]:
    """Publish a delayed message while one waits in each of these groups; return those that were told of it."""
    for group, bell in waiters.items():
        broker.client.sadd(KEYS.waiters({"control": "gpuflow.control"}.get(group, group)), bell)
    args = [json.dumps({"properties": {"delivery_tag": tag}}), 60, seconds, tag]
    broker_script("publish")(broker.client, ["t:cpu", KEYS.ready, KEYS.delayed, KEYS.parked], args)
    return [group for group, bell in waiters.items() if broker.client.lpop(bell) == "due"]


def test_somebody_is_told_of_a_message_that_is_due_before_the_next_sweep(broker: Broker) -> None:
    broker.client.flushall()

    assert delay(broker, "late", 600, control="t:a", cpu="t:b") == []
    assert delay(broker, "soon", 0.9, control="t:a", cpu="t:b") == ["control"], "a full worker waits there, too"
    assert delay(broker, "also soon", 0.9, cpu="t:b") == ["cpu"]

    seconds, _ = broker.client.time()
    broker.client.hset(KEYS.sweep, "alarm", seconds + 600)  # somebody comes, but for one that is due later
    assert delay(broker, "sooner", 0.9, control="t:a") == ["control"]


def test_one_sweeper_comes_in_time_for_a_delayed_message(broker: Broker) -> None:
    # Given two sweepers, and messages that are due before they sweep again
    broker.client.flushall()
    first, second = (Sweeper(KEYS, 60, rest_seconds=6000) for _ in range(2))
    assert first.sweep(broker.client, next_seconds=1000).again_seconds is None
    for tag in ("soon", "later"):
        delay(broker, tag, 600)
    seconds, _ = broker.client.time()
    broker.client.zadd(KEYS.delayed, {"soon": seconds + 500, "later": seconds + 900})
    # When they sweep, then one of them comes again in time for the first message
    again = [one.sweep(broker.client, next_seconds=1000).again_seconds for one in (first, second)]
    assert again[1] is None
    assert again[0] is not None
    assert 0 < again[0] <= 500
    # and who comes when it is due moves it, however short the time since the last sweep, and goes on with the next one
    broker.client.zadd(KEYS.delayed, {"soon": 1})
    broker.client.hset(KEYS.sweep, "alarm", 1)
    last = broker.client.hget(KEYS.sweep, "at")
    assert first.sweep(broker.client, next_seconds=1000).again_seconds is not None
    assert broker.client.zrange(KEYS.delayed, 0, -1) == ["later"]
    assert json.loads(broker.client.lindex("t:cpu", 0))["properties"]["delivery_tag"] == "soon"
    assert broker.client.hget(KEYS.sweep, "at") == last, "it swept nothing else"
