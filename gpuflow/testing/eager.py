"""Celery's eager mode with the app of gpuflow: a call runs in the process of the test, and no server is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from celery.backends.cache import CacheBackend

from gpuflow.celery_app import GPUFlow
from gpuflow.testing.pointing import forget_backend, nowhere, point

_EAGER: Final = "task_always_eager"


@contextlib.contextmanager
def eager(app: GPUFlow) -> Iterator[GPUFlow]:
    """Have `delay`, `apply_async` and canvas call their functions at once, for a block.

    States that a function sets are kept in the memory of this process.
    """
    settings = app._given_settings or nowhere()
    point(app, nowhere())
    changes = app.conf.changes
    before = {_EAGER: changes[_EAGER]} if _EAGER in changes else {}
    changes[_EAGER] = True
    app.__dict__["_get_backend"] = lambda: CacheBackend(app=app, backend="memory")  # hides the method of its class
    forget_backend(app)
    try:
        yield app
    finally:
        del app.__dict__["_get_backend"]
        forget_backend(app)
        del changes[_EAGER]
        changes.update(before)
        point(app, settings)
