"""Roles of the users of Flower (GPUFLOW_FLOWER_ROLES): who has logged in, and whether that user may make a request.

Every handler of Flower's list and of ours is replaced by a subclass that checks this before the request is served.
`NEEDS` names each route with the role that it needs; a request that is not in it needs an operator, so a route that
another version of Flower adds is closed to viewers.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

from flower.views.auth import LoginHandler
from tornado.web import HTTPError, URLSpec

from gpuflow.monitor.pages import PAGES
from gpuflow.settings.flower_roles import EVERYBODY, roles_by_user, user_key
from gpuflow.tokens.rights import Role

SETTING: Final = "GPUFLOW_FLOWER_ROLES"
#: Paths of ours that are no pages of the bar.
ASSETS_PATH: Final = "/monitor-assets/"
ACTION_PATH: Final = "/monitor/action"
ONE_PIPELINE: Final = r"/pipelines/([^/]{1,200})"

_SEE: Final = (
    # Flower's pages
    "/", "/workers", "/worker/(.+)", "/task/(.+)", "/tasks", "/tasks/datatable", "/broker",
    # its API
    "/api/workers", "/api/tasks", "/api/task/types", "/api/queues/length", "/api/task/info/(.*)",
    "/api/task/result/(.+)",
    # the rest of it
    "/metrics", "/healthcheck", "/static/(.*)", "/login/?", "/logout", ".*",
    # ours
    *(f"/{page.path}" for page in PAGES), *(f"/{page.path}/updates" for page in PAGES),
    ONE_PIPELINE, f"{ONE_PIPELINE}/updates", f"{ASSETS_PATH}(.*)",
)  # fmt: skip
_ACT: Final = (
    "/api/worker/shutdown/(.+)",
    "/api/worker/pool/restart/(.+)", "/api/worker/pool/grow/(.+)", "/api/worker/pool/shrink/(.+)",
    "/api/worker/pool/autoscale/(.+)",
    "/api/worker/queue/add-consumer/(.+)", "/api/worker/queue/cancel-consumer/(.+)",
    "/api/task/apply/(.+)", "/api/task/async-apply/(.+)", "/api/task/send-task/(.+)",
    "/api/task/abort/(.+)", "/api/task/timeout/(.+)", "/api/task/rate-limit/(.+)", "/api/task/revoke/(.+)",
    ACTION_PATH,
)  # fmt: skip
#: The role that each method of each route needs, by the route's pattern without a --url-prefix.
NEEDS: Final[Mapping[tuple[str, str], Role]] = {
    **{("GET", pattern): Role.VIEWER for pattern in _SEE},
    ("POST", "/tasks/datatable"): Role.VIEWER,  # a search of the table: it reads, with its query in the body
    ("POST", ".*"): Role.VIEWER,  # answers that there is no such page
    **{("POST", pattern): Role.OPERATOR for pattern in _ACT},
}


def needed(method: str, pattern: str) -> Role:
    """Return the role that a request needs. OPTIONS, by which a browser asks what it may send, does nothing."""
    if method == "OPTIONS":
        return Role.VIEWER
    return NEEDS.get(("GET" if method == "HEAD" else method, pattern), Role.OPERATOR)


def has_login(options: Any) -> bool:
    """Say whether Flower asks who is there."""
    return bool(options.basic_auth or options.auth)


def user_of(handler: Any) -> str:
    """Return the name of who has logged in: the e-mail of OAuth, or the name of a basic login; '' where there is none.

    Raises HTTPError 401 for a wrong basic login.
    """
    user = handler.current_user  # True for a basic login that Flower has just checked
    if isinstance(user, str):
        return user
    if not user or not handler.application.options.basic_auth:
        return ""
    credentials = handler.request.headers.get("Authorization", "").split()[1]
    return b64decode(credentials).decode().partition(":")[0]


class Roles:
    """What GPUFLOW_FLOWER_ROLES gives to whom; of no entries, everybody who has logged in is an operator."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self._by_user = {name: Role(role) for name, role in roles_by_user(entries).items()}

    def __bool__(self) -> bool:
        return bool(self._by_user)

    def of(self, user: str) -> Role:
        """Return the role of a user: a viewer, where neither the user nor everybody is named."""
        if not self._by_user:
            return Role.OPERATOR
        return self._by_user.get(user_key(user)) or self._by_user.get(EVERYBODY, Role.VIEWER)

    def why_not(self, handler: Any) -> str:
        """Return why the user of a request may not act, empty where no role forbids it. Raises HTTPError 401."""
        if not self._by_user:
            return ""
        if not has_login(handler.application.options):
            return f"read-only: {SETTING} says who may act, and Flower has no login that tells who asks"
        if not handler.current_user:
            return f"read-only: nobody has logged in, and {SETTING} says who may act"
        user = user_of(handler)
        if self.of(user) is Role.OPERATOR:
            return ""
        return f"read-only: {user or 'this user'} is a viewer by {SETTING}; an operator may act"


class Guarded:
    """What is put before a handler of Flower: it refuses what the user's role does not include."""

    roles: Roles
    pattern: str

    def prepare(self) -> Any:
        """Refuse the request, or go on with it. Raises HTTPError 401, 403."""
        handler: Any = self
        if needed(handler.request.method, self.pattern) is Role.OPERATOR and (why := self.roles.why_not(handler)):
            raise HTTPError(403, why)
        return super().prepare()  # type: ignore[misc]

    def render(self, *args: Any, **values: Any) -> Any:
        """Render a page of Flower, for a viewer without its buttons. Not every page says whether it is read-only."""
        if not values.get("read_only", True) and self.roles.why_not(self):
            values["read_only"] = True
        return super().render(*args, **values)  # type: ignore[misc]


def guarded(handlers: list[Any], roles: Roles) -> list[Any]:
    """Return a list of Flower's handlers, each of which checks the role of the user.

    The login is left as it is: its class is only a factory of that of Flower's `auth_provider`, which the user calls
    before anybody is logged in.
    """
    return [_guard(spec, roles) for spec in handlers]


def _guard(spec: Any, roles: Roles) -> Any:
    if isinstance(spec, URLSpec):
        pattern, handler = spec.regex.pattern.removesuffix("$"), spec.handler_class
    else:
        pattern, handler = spec[0], spec[1]
    if handler is LoginHandler:
        return spec
    made = type(handler.__name__, (Guarded, handler), {"roles": roles, "pattern": pattern})
    if isinstance(spec, URLSpec):
        return URLSpec(pattern, made, spec.kwargs, spec.name)
    return (pattern, made, *spec[2:])


__all__ = [
    "ACTION_PATH",
    "ASSETS_PATH",
    "NEEDS",
    "ONE_PIPELINE",
    "SETTING",
    "Guarded",
    "Roles",
    "guarded",
    "has_login",
    "needed",
    "user_of",
]
