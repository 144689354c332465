"""The connection of one command to its fleet: REDIS_URL, else this user's embedded server.

Celery is imported here, when a command needs it, and nowhere above.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from gpuflow.cli.errors import Terminated
from gpuflow.errors import BrokerUnavailable
from gpuflow.settings import Settings

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow

#: What may be asked of a fleet that does not run: `gpuflow status` and others look at the stored data.
NO_FLEET = (
    "REDIS_URL is not set and no embedded server runs; set REDIS_URL=redis://host:6379/0, "
    "or start a local cluster with `gpuflow up`"
)


def app_for(settings: Settings) -> GPUFlow:
    """Return an app with these settings."""
    from gpuflow.celery_app import GPUFlow

    return GPUFlow("gpuflow", settings=settings)


def _reached(app: GPUFlow) -> GPUFlow:
    """Return the app as soon as its broker answers; what is waited for, and how long, is told on stderr.

    Raises BrokerUnavailable after `submit_timeout_seconds`, and at once where waiting does not help: a wrong password.
    """
    from gpuflow.broker.answers import still_reads
    from gpuflow.broker.waiting import until_reached
    from gpuflow.cli.output import note
    from gpuflow.client import reachable

    def ping() -> None:
        try:
            with reachable():
                app.redis.ping()
        except BrokerUnavailable as error:
            if error.__cause__ is None or not still_reads(error.__cause__):
                raise

    until_reached(ping, app.settings.submit_timeout_seconds, note)
    return app


@contextmanager
def connected(settings: Settings | None = None, *, stored: bool = True) -> Iterator[GPUFlow]:
    """Give an app that is connected to the fleet.

    `stored`: if no server runs, the embedded one with the data of former runs is started as long as the command takes.
    Raises BrokerUnavailable when there is nothing to connect to.
    """
    settings = settings or Settings.load()
    if settings.redis_url:
        yield _reached(app_for(settings))
        return
    from gpuflow.broker.embedded import EmbeddedServer

    url = EmbeddedServer.running(settings.state_dir)
    if url is not None:
        yield app_for(_with_login(settings.model_copy(update={"redis_url": url})))
        return
    if not stored or not (settings.state_dir / "embedded" / "data").is_dir():
        raise BrokerUnavailable(NO_FLEET)
    server = EmbeddedServer(settings.state_dir, program=settings.valkey_server)
    try:
        yield app_for(settings.model_copy(update={"redis_url": server.start()}))
    finally:
        server.stop()


def _with_login(settings: Settings) -> Settings:
    """Return the settings with the login of this user's local gateway, where none is set and one runs."""
    from gpuflow.gateway.login import read_login

    found = read_login(settings.state_dir)
    if found is None or settings.worker_token is not None or settings.gateway_url is not None:
        return settings
    return settings.model_copy(update={"gateway_url": found[0], "worker_token": SecretStr(found[1])})


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end the command as Ctrl-C does: everything is stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise Terminated(number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
