"""The requests of the monitor: a page, what has changed since, and an action. They run on tornado's loop; all
that blocks is done in threads of the feeds.

Pages may be seen by who passes Flower's login. An action needs a login to be configured, a request of our own page
(xsrf token, and same origin where the browser says), a Flower that is not read-only, and a user whose role includes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from flower.views import BaseHandler
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from tornado.web import HTTPError, RequestHandler, authenticated

from gpuflow.audit.actors import acting
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import BrokerUnavailable, GPUFlowError, UnknownTask
from gpuflow.fleet.orders import OrderRefused
from gpuflow.handles import reachable
from gpuflow.logs import get_logger
from gpuflow.monitor.actions import ACTIONS, ActionRefused
from gpuflow.monitor.feeds import Body, Feed, Feeds, Rows
from gpuflow.monitor.pages import PAGES, Page, Renderer, one_pipeline
from gpuflow.monitor.roles import ACTION_PATH, ASSETS_PATH, Roles, has_login, user_of
from gpuflow.outages import outage
from gpuflow.terminal import one_line

#: Everything is of this server, and nothing inline runs.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
#: The longest body of an action, in bytes.
MOST_BODY: Final = 4096
AWAY: Final = "The broker of the fleet does not answer; `gpuflow doctor` says why."

NO_LOGIN: Final = "read-only: Flower has no login. Set FLOWER_BASIC_AUTH=user:password to get the actions."
READ_ONLY: Final = "read-only: set by GPUFLOW_FLOWER_READ_ONLY or Flower's --read-only."

log = get_logger("gpuflow.monitor")


class Monitor:
    """What the handlers share: the app of the fleet, its feeds, the roles of users, and the version of the assets."""

    def __init__(self, app: GPUFlow, feeds: Feeds, roles: Roles) -> None:
        self.app = app
        self.feeds = feeds
        self.roles = roles
        folder = Path(__file__).parent / "static"
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()))
        self.assets_version = digest.hexdigest()[:12]

    def why_read_only(self, options: Any) -> str:
        """Return why nobody may act, empty where who has logged in may."""
        if self.app.settings.flower_read_only or options.read_only:
            return READ_ONLY
        return "" if has_login(options) else NO_LOGIN

    async def feed(self, key: str, read: Callable[[], Rows]) -> Feed:
        """Return a feed as it was a moment ago. Raises HTTPError 503, 404."""

        def checked() -> Rows:
            with reachable():
                return read()

        try:
            found = await self.feeds.fresh(key, checked)
        except UnknownTask as error:
            raise HTTPError(404, str(error)) from None
        except (BrokerUnavailable, RedisError) as error:
            raise broker_away(error) from None
        outage.answered()
        return found


def broker_away(error: Exception) -> HTTPError:
    """Say with its cause that the broker is away, and return the answer. The log has it once; see `outages`."""
    log.warning("broker_away", cause=str(error.__cause__ or error))
    return HTTPError(503, AWAY)


class MonitorHandler(BaseHandler):  # type: ignore[misc]
    """What all requests of the monitor have in common."""

    monitor: Monitor

    def initialize(self, monitor: Monitor, page: Page = PAGES[0]) -> None:
        """Take what the table of handlers gives: `page` is the page of the bar that is asked for."""
        self.monitor = monitor
        self.page = page

    def set_default_headers(self) -> None:
        """Set headers; unlike Flower's API, no other site may read these answers, whatever Flower's options are."""
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    def options(self, *_: Any, **__: Any) -> None:
        """Answer no preflight."""
        raise HTTPError(405)

    @property
    def prefix(self) -> str:
        """The path before ours, where Flower has a --url-prefix."""
        prefix = (self.application.options.url_prefix or "").strip("/")
        return f"/{prefix}" if prefix else ""

    @property
    def why_read_only(self) -> str:
        """Why the user of this request may not act, empty where the user may. Raises HTTPError 401."""
        return self.monitor.why_read_only(self.application.options) or self.monitor.roles.why_not(self)

    def renderer(self) -> Renderer:
        """Return what renders the rows of this request: the same for all who may act, and for all who may not."""
        return Renderer(can_act=not self.why_read_only, prefix=self.prefix)

    async def feed_of(self, page: Page) -> Feed:
        """Return the feed of a page of the bar."""
        return await self._feed(page.path, page.read)

    async def feed_of_pipeline(self, pipeline_id: str) -> Feed:
        """Return the feed of one pipeline's page."""
        return await self._feed(f"pipelines/{pipeline_id}", partial(one_pipeline, pipeline_id=pipeline_id))

    async def _feed(self, path: str, read: Callable[[Renderer, GPUFlow], Rows]) -> Feed:
        renderer, app = self.renderer(), self.monitor.app
        return await self.monitor.feed(f"{path} can_act={renderer.can_act}", lambda: read(renderer, app))

    async def send_page(self, template: str, title: str, path: str, feed: Feed) -> None:
        """Send a whole page with the rows of a feed."""
        text = self.renderer().render(
            template,
            title=title,
            here=path,
            pages=PAGES,
            feed=feed,
            updates=f"{self.prefix}/{quote(path)}/updates",
            action=f"{self.prefix}{ACTION_PATH}",
            assets=f"{self.prefix}{ASSETS_PATH}",
            assets_version=self.monitor.assets_version,
            favicon=self.static_url("favicon.ico"),
            token=self.xsrf_token.decode(),
            why_read_only=self.why_read_only,
        )
        loop = asyncio.get_running_loop()
        self.send(await loop.run_in_executor(self.monitor.feeds.threads, Body.of, text), "text/html; charset=utf-8")

    def send(self, body: Body, content_type: str) -> None:
        """Send a body, compressed where the browser takes that."""
        self.set_header("Content-Type", content_type)
        self.set_header("Vary", "Accept-Encoding")
        if body.compressed is not None and "gzip" in self.request.headers.get("Accept-Encoding", ""):
            self.set_header("Content-Encoding", "gzip")
            self.finish(body.compressed)
        else:
            self.finish(body.plain)

    def compute_etag(self) -> None:
        """Answers are not cached, so their digest is not computed."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer an error as JSON: `{"error": ...}`."""
        error = (kwargs.get("exc_info") or (None, None))[1]
        text = (error.get_message() if isinstance(error, HTTPError) else None) or self._reason
        if status_code == 401:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"error": one_line(text, 500)}))


class PageHandler(MonitorHandler):
    """A page of the bar."""

    @authenticated  # type: ignore[untyped-decorator]
    async def get(self) -> None:
        """Send the page."""
        await self.send_page(self.page.template, self.page.title, self.page.path, await self.feed_of(self.page))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer an error as a page."""
        error = (kwargs.get("exc_info") or (None, None))[1]
        text = (error.get_message() if isinstance(error, HTTPError) else None) or self._reason
        if status_code == 401:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        page = Renderer(can_act=False, prefix=self.prefix).render(
            "error.html",
            title=str(status_code),
            text=one_line(text, 500),
            pages=PAGES if status_code != 401 else (),
            here="",
            assets=f"{self.prefix}{ASSETS_PATH}",
            assets_version=self.monitor.assets_version,
            favicon=self.static_url("favicon.ico"),
        )
        self.finish(page)


class OnePipeline(PageHandler):
    """The page of one pipeline."""

    @authenticated  # type: ignore[untyped-decorator]
    async def get(self, pipeline_id: str) -> None:
        """Send the page."""
        feed = await self.feed_of_pipeline(pipeline_id)
        await self.send_page("pipeline.html", "Pipeline", f"pipelines/{pipeline_id}", feed)


class Updates(MonitorHandler):
    """What has changed of a page since a version (`?since=`), as JSON."""

    @authenticated  # type: ignore[untyped-decorator]
    async def get(self) -> None:
        """Send the changes."""
        await self.send_changes(await self.feed_of(self.page))

    async def send_changes(self, feed: Feed) -> None:
        """Send what has changed of a feed."""
        since = RequestHandler.get_argument(self, "since", "")
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self.monitor.feeds.threads, feed.changes, since)
        self.send(body, "application/json")


class PipelineUpdates(Updates):
    """What has changed of one pipeline's page."""

    @authenticated  # type: ignore[untyped-decorator]
    async def get(self, pipeline_id: str) -> None:
        """Send the changes."""
        await self.send_changes(await self.feed_of_pipeline(pipeline_id))


class ActionHandler(MonitorHandler):
    """An action: `{"action": ..., "target": ...}` in the body, the page's token in `X-XSRFToken`."""

    def check_xsrf_cookie(self) -> None:
        """Refuse what does not come from a page of ours. Stricter than Flower, which trusts a basic login alone.

        A browser that says of which site the page is knows the address that it shows; the host that comes here may be
        another, by a proxy. Of an older browser, the origin is compared with that.
        """
        site = self.request.headers.get("Sec-Fetch-Site")
        origin = self.request.headers.get("Origin")
        if site is None and origin is not None:
            site = "same-origin" if urlsplit(origin).netloc == self.request.host else "cross-site"
        if site is not None and site != "same-origin":
            raise HTTPError(403, "the request comes from a page of another site")
        RequestHandler.check_xsrf_cookie(self)

    @authenticated  # type: ignore[untyped-decorator]
    async def post(self) -> None:
        """Do it. 400: no such action; 403: not allowed; 404: no such target; 409: its state forbids it."""
        if why := self.why_read_only:
            raise HTTPError(403, why)
        name, target = self._asked()
        action = ACTIONS.get(name)
        if action is None:
            raise HTTPError(400, f"no action {one_line(name, 40)!r}; there are {', '.join(ACTIONS)}")
        app = self.monitor.app
        loop = asyncio.get_running_loop()
        actor = "flower:" + " ".join(part for part in (user_of(self), self.request.remote_ip) if part)

        def done() -> str:
            with acting(actor):
                return action(app, target)

        try:
            text = await loop.run_in_executor(self.monitor.feeds.threads, done)
        except UnknownTask as error:
            raise HTTPError(404, str(error)) from None
        except (ActionRefused, OrderRefused) as error:
            raise HTTPError(409, str(error)) from None
        except (BrokerUnavailable, RedisError, OperationalError) as error:
            raise broker_away(error) from None
        except GPUFlowError as error:
            raise HTTPError(409, str(error)) from None
        log.info("monitor.action", action=name, target=target, actor=actor)
        self.monitor.feeds.expire()
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"message": one_line(text, 500)}))

    def _asked(self) -> tuple[str, str]:
        if len(self.request.body) > MOST_BODY:
            raise HTTPError(413, "the body is too long")
        try:
            asked = json.loads(self.request.body)
            name, target = asked["action"], asked["target"]
        except (ValueError, KeyError, TypeError):
            raise HTTPError(400, 'the body is not {"action": ..., "target": ...}') from None
        if not isinstance(name, str) or not isinstance(target, str) or not 0 < len(target) <= 256:
            raise HTTPError(400, "action and target are texts")
        return name, target


__all__ = ["ActionHandler", "Monitor", "OnePipeline", "PageHandler", "PipelineUpdates", "Updates"]
