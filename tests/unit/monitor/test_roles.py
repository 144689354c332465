"""Roles of Flower's users: who is what, and that the table has each route of the Flower that is installed."""

from __future__ import annotations

import copy
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flower import urls
from flower.views.auth import (
    GithubLoginHandler,
    GitLabLoginHandler,
    GoogleAuth2LoginHandler,
    LoginHandler,
    OktaLoginHandler,
)
from tornado.httputil import HTTPHeaders
from tornado.web import HTTPError, RequestHandler, URLSpec

from gpuflow.celery_app import GPUFlow
from gpuflow.monitor.installing import install
from gpuflow.monitor.roles import NEEDS, Guarded, Roles, needed, user_of
from gpuflow.settings import Settings
from gpuflow.tokens.rights import Role

METHODS = [method for method in RequestHandler.SUPPORTED_METHODS if method not in ("OPTIONS", "HEAD")]


def methods_of(handler: type) -> set[str]:
    """Return what a handler answers with something of its own."""
    bare = RequestHandler.get
    return {method for method in METHODS if getattr(handler, method.lower()) is not bare}


def route_of(spec: Any) -> tuple[str, type]:
    if isinstance(spec, URLSpec):
        return spec.regex.pattern.removesuffix("$"), spec.handler_class
    return spec[0], spec[1]


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[list[Any]]:
    """The handlers of Flower with ours, for a fleet with roles."""
    handlers, settings = list(urls.handlers), copy.copy(urls.settings)
    env = {"REDIS_URL": "redis://127.0.0.1:1", "GPUFLOW_FLOWER_ROLES": "ana=operator"}
    app = GPUFlow("roles", settings=Settings.load(env, tmp_path), set_as_current=False)
    try:
        install(app, with_pages=True)
        yield urls.handlers
    finally:
        urls.handlers[:] = handlers
        urls.settings.clear()
        urls.settings.update(settings)
        app.close()


def test_the_table_has_every_route_and_no_other(installed: list[Any]) -> None:
    # Given what the installed Flower answers, and what the pages of the fleet add
    found = set()
    for spec in installed:
        pattern, handler = route_of(spec)
        answered = methods_of(handler)
        if handler is LoginHandler:  # only makes one of these
            providers = (GoogleAuth2LoginHandler, GithubLoginHandler, GitLabLoginHandler, OktaLoginHandler)
            answered = {method for each in providers for method in methods_of(each)}
        else:
            assert issubclass(handler, Guarded), pattern
            assert handler.pattern == pattern
        found |= {(method, pattern) for method in answered}
    # Then each has a role, and nothing is in the table that is not there
    assert found == set(NEEDS)


def test_what_is_not_in_the_table_needs_an_operator() -> None:
    assert needed("GET", "/workers") is Role.VIEWER
    assert needed("HEAD", "/workers") is Role.VIEWER
    assert needed("POST", "/workers") is Role.OPERATOR
    assert needed("GET", "/api/new/(.+)") is Role.OPERATOR
    assert needed("DELETE", "/tasks") is Role.OPERATOR
    assert needed("OPTIONS", "/api/worker/shutdown/(.+)") is Role.VIEWER


@pytest.mark.parametrize(
    ("entries", "user", "role"),
    [
        ((), "ana", Role.OPERATOR),
        ((), "", Role.OPERATOR),
        (("ana=operator",), "ana", Role.OPERATOR),
        (("ana=operator",), "Ana", Role.VIEWER),
        (("ana=operator",), "ben", Role.VIEWER),
        (("ana=operator",), "", Role.VIEWER),
        (("ben=viewer", "*=operator"), "ben", Role.VIEWER),
        (("ben=viewer", "*=operator"), "ana", Role.OPERATOR),
        (("ben=viewer", "*=operator"), "*", Role.OPERATOR),
        (("Ben@x.org=viewer", "*=operator"), "ben@X.org", Role.VIEWER),
    ],
)
def test_the_role_of_a_user(entries: tuple[str, ...], user: str, role: Role) -> None:
    assert Roles(entries).of(user) is role


def request(user: object, login: str = "", *, auth: str = "", basic: bool = True) -> Any:
    """A request of a Flower with a login; `user` is what Flower says of it."""
    headers = {"Authorization": "Basic " + b64encode(login.encode()).decode()} if login else {}
    options = SimpleNamespace(basic_auth=["x"] if basic else None, auth=auth)
    return SimpleNamespace(
        application=SimpleNamespace(options=options),
        request=SimpleNamespace(headers=HTTPHeaders(headers), method="POST"),
        current_user=user,
    )


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (request(True, "ana:a word:more"), "ana"),
        (request(True, "änne:x"), "änne"),
        (request(True, ":x"), ""),
        (request("ana@x.org", auth=".*@x.org", basic=False), "ana@x.org"),
        (request("ana@x.org", "door:x", auth=".*@x.org"), "ana@x.org"),
        (request(None, auth=".*@x.org", basic=False), ""),
        (request(True, "ana:x", basic=False), ""),
    ],
)
def test_who_has_logged_in(handler: Any, name: str) -> None:
    assert user_of(handler) == name


def test_nobody_acts_before_the_login_whatever_everybody_may() -> None:
    everybody = Roles(("*=operator",))
    assert "nobody has logged in" in everybody.why_not(request(None, auth=".*@x.org", basic=False))
    assert everybody.why_not(request("ana@x.org", auth=".*@x.org", basic=False)) == ""
    # without a login there are no users, so nobody is one who may act; without roles that is not for them to say
    for roles in (everybody, Roles(("ana=operator",))):
        assert "Flower has no login" in roles.why_not(request(True, basic=False))
    assert Roles(()).why_not(request(True, basic=False)) == ""


def test_a_request_is_refused_before_the_handler_sees_it() -> None:
    served = []

    class Act:
        def prepare(self) -> None:
            served.append(self)

    made: Any = type("Act", (Guarded, Act), {"roles": Roles(("ana=operator",)), "pattern": "/api/new"})()
    made.__dict__.update(vars(request(True, "ben:x")))
    with pytest.raises(HTTPError, match="GPUFLOW_FLOWER_ROLES") as refused:
        made.prepare()
    assert refused.value.status_code == 403
    assert not served
    made.__dict__.update(vars(request(True, "ana:x")))
    made.prepare()
    assert served == [made]
