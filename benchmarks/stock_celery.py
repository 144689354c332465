"""Plain Celery as the benchmarks' peer: with the settings that everybody gives it for long tasks.

Late acknowledgement and a prefetch of one; JSON; results in the same Redis, under a prefix of its own.
"""

from __future__ import annotations

from celery import Celery


def stock_app(url: str) -> Celery:
    """Return a new app on the server at `url`."""
    app = Celery("bench_peer", broker=url, backend=url)
    app.conf.update(
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        task_default_queue="bench-peer",
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        broker_transport_options={"global_keyprefix": "peer:"},
        result_backend_transport_options={"global_keyprefix": "peer:"},
    )
    return app
