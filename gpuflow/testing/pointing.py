"""Points the app of a test process at the server of the tests, and away from every other one."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from gpuflow.celery_app import GPUFlow
from gpuflow.local import close_connections
from gpuflow.settings import Settings
from gpuflow.submission_checks import forget

#: What Celery makes of the address of the broker, beside what gpuflow does.
_MADE_BY_CELERY: Final = ("amqp", "control", "events")
#: Where a call goes that no fixture of gpuflow.testing is there for: the name stands in the error of that call.
_NO_SERVER: Final = Path("/nonexistent/use-the-fixture-gpuflow_fleet")


def nowhere() -> Settings:
    """Return settings with the address of a server that cannot be: what is sent there fails after a second."""
    return Settings.load(
        env={
            "REDIS_URL": f"unix://{_NO_SERVER}",
            "RESULTS_DIR": str(_NO_SERVER / "results"),
            "GPUFLOW_STATE_DIR": str(_NO_SERVER / "state"),
            "GPUFLOW_CACHE_DIR": str(_NO_SERVER / "cache"),
        },
        cwd=_NO_SERVER,
    ).model_copy(update={"submit_timeout_seconds": 1.0})


def point(app: GPUFlow, settings: Settings) -> None:
    """Use these settings from now on. What the team has changed of `app.conf` stays; open connections are closed."""
    if app.configured:
        close_connections(app)
        if "redis" in app.__dict__:
            app.redis.close()
    app._given_settings = settings
    mine = [name for name, value in vars(GPUFlow).items() if isinstance(value, cached_property)]
    for name in (*mine, *_MADE_BY_CELERY):
        app.__dict__.pop(name, None)
    forget_backend(app)
    forget(app)
    app._pool = None
    if app.configured:
        defaults = app._defaults()
        (layer,) = [one for one in app.conf.defaults if one.get("worker_pool") == defaults["worker_pool"]]
        layer.update(defaults)


def forget_backend(app: Any) -> None:
    """Have the app make its result backend anew when it next needs one."""
    app._backend_cache = None
    app._local = threading.local()
