"""Celery's eager mode with the app of gpuflow: a call runs in the process of the test, and no server is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from celery.backends.cache import CacheBackend

from gpuflow.celery_app import GPUFlow
from gpuflow.testing.pointing import forget_backend, nowhere, point


@contextlib.contextmanager
def eager(app: GPUFlow) -> Iterator[GPUFlow]:
    """Have `delay`, `apply_async` and canvas call their functions at once, for a block.

    States and results are kept in memory, and only where Celery stores them: `self.update_state`, and with
    `task_store_eager_result`.
    """
    settings = app._given_settings or nowhere()
    point(app, nowhere())
    changes = app.conf.changes
    before = changes.get("task_always_eager")
    changes["task_always_eager"] = True
    app.__dict__["_get_backend"] = lambda: CacheBackend(app=app, backend="memory")  # hides the method of its class
    forget_backend(app)
    try:
        yield app
    finally:
        del app.__dict__["_get_backend"]
        forget_backend(app)
        changes.pop("task_always_eager")
        if before is not None:
            changes["task_always_eager"] = before
        point(app, settings)
