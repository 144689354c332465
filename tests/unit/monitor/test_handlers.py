"""Requests of the monitor: which pages may act, and what is done off the event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.httputil import HTTPHeaders
from tornado.web import HTTPError, RequestHandler

from gpuflow.monitor.feeds import Body, Feeds
from gpuflow.monitor.handlers import ActionHandler, Updates

#: Where the browser is, and under which host the request comes here.
OURS, BEHIND_A_PROXY = "https://flower.example", "127.0.0.1:5555"


@pytest.mark.parametrize(
    ("headers", "host", "passes"),
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": OURS}, BEHIND_A_PROXY, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": OURS}, "flower.example", True),
        ({"Sec-Fetch-Site": "cross-site", "Origin": OURS}, "flower.example", False),
        ({"Sec-Fetch-Site": "same-site"}, "flower.example", False),
        ({"Origin": OURS}, "flower.example", True),
        ({"Origin": OURS}, BEHIND_A_PROXY, False),
        ({"Origin": "null"}, "flower.example", False),
        ({}, "flower.example", True),
    ],
)
def test_a_page_of_ours_may_act_also_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], host: str, passes: bool
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(RequestHandler, "check_xsrf_cookie", checked.append)
    handler: Any = ActionHandler.__new__(ActionHandler)
    handler.request = SimpleNamespace(headers=HTTPHeaders(headers), host=host)
    if passes:
        handler.check_xsrf_cookie()
        assert checked == [handler], "the token of the page is asked for in any case"
    else:
        with pytest.raises(HTTPError) as told:
            handler.check_xsrf_cookie()
        assert told.value.status_code == 403


async def test_changes_are_encoded_off_the_event_loop() -> None:
    threads: list[int] = []
    sent: list[bytes] = []

    def changes(since: str) -> Body:
        threads.append(threading.get_ident())
        return Body.of(since)

    handler: Any = Updates.__new__(Updates)
    handler.request = SimpleNamespace(arguments={"since": [b"abc.1"]})
    handler.monitor = SimpleNamespace(feeds=Feeds())
    handler.send = lambda body, _: sent.append(body.plain)
    await handler.send_changes(SimpleNamespace(changes=changes))

    assert sent == [b"abc.1"]
    assert threads != [threading.get_ident()]
