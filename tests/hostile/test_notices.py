"""Receivers of notices that mean harm: a call ends in time, reads next to nothing, and shows no header."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.policy.hosts import Hosts
from gpuflow.routing.families import MAX_NOTICES
from gpuflow.spec import canonical
from gpuflow.upkeep.notices import NotDelivered, deliver
from tests.support.hostile_peer import HostilePeer
from tests.support.waiting import patient

HERE = Hosts(allowed=("127.0.0.0/8",))


@pytest.fixture
def peer() -> Iterator[HostilePeer]:
    with HostilePeer() as made:
        yield made


def test_a_receiver_that_drips_is_cut(peer: HostilePeer) -> None:
    began = time.monotonic()

    with pytest.raises(NotDelivered, match=r"within 0\.5 s"):
        deliver({"url": f"{peer.url}/drip-header"}, {}, hosts=HERE, timeout_seconds=0.5)

    assert time.monotonic() - began < patient(30)  # it would never end


def test_an_endless_answer_is_not_read(peer: HostilePeer) -> None:
    deliver({"url": f"{peer.url}/endless"}, {}, hosts=HERE)


def test_a_redirect_is_not_followed(peer: HostilePeer) -> None:
    with pytest.raises(NotDelivered, match="answered 302"):
        deliver({"url": f"{peer.url}/loop"}, {}, hosts=HERE)

    assert peer.asked == ["/loop"]


@pytest.mark.parametrize("value", ["hidden\r\nX-More: 1", "hidden\0", "hidden \u20ac"])
def test_a_header_that_is_none_is_not_shown(peer: HostilePeer, value: str) -> None:
    with pytest.raises(NotDelivered) as refused:
        deliver({"url": f"{peer.url}/large", "headers": {"X-Token": value}}, {}, hosts=HERE)

    assert "hidden" not in str(refused.value)


def test_a_task_has_few_of_them() -> None:
    entry = {"on": ["finished"], "url": "http://127.0.0.1/"}
    canonical({"taskType": "echo", "echo": {"output": 1}, "notify": [entry] * MAX_NOTICES})

    with pytest.raises(InvalidTemplate, match="at most 10"):
        canonical({"taskType": "echo", "echo": {"output": 1}, "notify": [entry] * (MAX_NOTICES + 1)})
