"""Adds the pages to Flower before it begins. Flower has no plug-in point, but a list of handlers that it reads then.

Nothing of Flower is changed but that list: it gets ours before its last one, and with GPUFLOW_FLOWER_ROLES each of its
handlers is a subclass that checks the role of the user. Its templates are loaded by a loader that adds our links to its
navigation bar.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from click import ClickException
from flower import urls
from tornado.ioloop import IOLoop
from tornado.options import options
from tornado.template import Loader
from tornado.web import StaticFileHandler, url

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import InvalidSettings
from gpuflow.logs import dress, get_logger, use_level
from gpuflow.monitor.broker import with_queues_of_fleet
from gpuflow.monitor.feeds import Feeds
from gpuflow.monitor.handlers import ActionHandler, Monitor, OnePipeline, PageHandler, PipelineUpdates, Updates
from gpuflow.monitor.pages import PAGES
from gpuflow.monitor.roles import ACTION_PATH, ASSETS_PATH, ONE_PIPELINE, SETTING, Roles, guarded, has_login
from gpuflow.tokens.service_users import ServiceRole, role_of_login

ASSETS: Final = Path(__file__).parent / "static"
#: Where the links go in Flower's bar: at the end of its first list.
_BAR: Final = "navbar.html"
_LIST_END: Final = "</ul>"

log = get_logger("gpuflow.monitor")


class CannotStart(ClickException):
    """Flower cannot start with these settings; shown without a traceback, exit code 2."""

    exit_code = 2


def install(app: GPUFlow, *, with_pages: bool) -> None:
    """Add the pages, once, and let each handler check the role of the user where there are roles. Raises CannotStart.

    Roles and GPUFLOW_FLOWER_READ_ONLY hold without the pages, too: `--no-fleet-pages` opens nothing that they close.
    """
    try:
        _log_as_set(app)
        roles = Roles(app.settings.flower_roles)
    except InvalidSettings as error:
        raise CannotStart(str(error)) from None
    if with_pages:
        _add_pages(app, roles)
    _hold_read_only(app)
    if roles:
        urls.handlers[:] = guarded(urls.handlers, roles)
        IOLoop.current().add_callback(_warn_without_login)  # when Flower has read all its options


def _log_as_set(app: GPUFlow) -> None:
    """Let Flower write by LOG_LEVEL, unless its own `--logging` says otherwise, and by LOG_FORMAT."""
    settings = app.settings
    options.logging = settings.log_level.lower()

    def logs_are_set_up() -> None:
        use_level(settings.log_level)
        dress(settings.log_format, None)

    options.add_parse_callback(logs_are_set_up)  # after tornado's own, which makes the handlers


def _hold_read_only(app: GPUFlow) -> None:
    """Make Flower's own pages and API read-only, if the setting says so or the broker's user is for a Flower that only
    reads, whatever Flower's options are.

    A Flower of such a user asks workers nothing, as its user may not: who may ask a worker for its state may also tell
    it to stop.
    """
    only_reads = role_of_login(app.settings.redis_url) is ServiceRole.FLOWER
    if only_reads:
        # Its wish for their events, too, goes by this; workers of a fleet send them unasked.
        app.control.broadcast = _no_broadcast
    if app.settings.flower_read_only or only_reads:
        options.add_parse_callback(lambda: setattr(options, "read_only", True))


def _warn_without_login() -> None:
    """Say that nobody may act, as nobody has a name that a role could belong to."""
    if not has_login(options):
        mend = "set FLOWER_BASIC_AUTH=user:password or Flower's --auth"
        log.warning("flower_roles_without_login", setting=SETTING, effect="nobody may act", mend=mend)


def _add_pages(app: GPUFlow, roles: Roles) -> None:
    """Add the pages of the fleet, and links to them."""
    monitor = Monitor(app, Feeds(), roles)
    shared = {"monitor": monitor}
    ours: list[Any] = []
    for page in PAGES:
        ours.append(url(f"/{page.path}", PageHandler, {**shared, "page": page}, name=f"gpuflow-{page.path}"))
        ours.append(url(f"/{page.path}/updates", Updates, {**shared, "page": page}))
    ours += [
        url(ONE_PIPELINE, OnePipeline, shared),
        url(f"{ONE_PIPELINE}/updates", PipelineUpdates, shared),
        url(ACTION_PATH, ActionHandler, shared, name="gpuflow-action"),
        url(f"{ASSETS_PATH}(.*)", StaticFileHandler, {"path": str(ASSETS)}),
    ]
    urls.handlers[-1:-1] = ours
    urls.handlers[:] = with_queues_of_fleet(urls.handlers, monitor)
    urls.settings["template_loader"] = FlowerTemplates(urls.settings["template_path"])


def _no_broadcast(*_: Any, **__: Any) -> list[Any]:
    """Tell workers nothing, and hear nothing from them."""
    return []


class FlowerTemplates(Loader):  # type: ignore[misc]
    """Loads Flower's templates, its bar with our links."""

    def _create_template(self, name: str) -> Any:
        if name != _BAR:
            return super()._create_template(name)
        from tornado.template import Template

        text = (Path(self.root) / name).read_text(encoding="utf-8")
        return Template(with_links(text), name=name, loader=self)


def with_links(bar: str) -> str:
    """Return Flower's navigation bar with a link to each of our pages; as it is, where it is of another form."""
    links = "".join(
        '<li class="nav-item"><a class="nav-link" '
        f"href=\"{{{{ reverse_url('gpuflow-{page.path}') }}}}\">{page.title}</a></li>\n"
        for page in PAGES
    )
    return bar.replace(_LIST_END, links + _LIST_END, 1)


__all__ = ["CannotStart", "FlowerTemplates", "install", "with_links"]
