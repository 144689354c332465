"""Stock Celery's app of its own integration tests: `celery -A celerys_own_stock worker`."""

from __future__ import annotations

import os

import celerys_own_control  # noqa: F401  (its command)
from celery import Celery
from t.integration.tasks import ClassBasedAutoRetryTask

app = Celery("celery.tests", broker=os.environ["TEST_BROKER"], backend=os.environ["TEST_BACKEND"])
app.conf.update(
    accept_content={"json"},
    include=["t.integration.tasks"],
    result_extended=True,
    timezone="UTC",
    worker_hijack_root_logger=False,
    worker_log_color=False,
)
app.register_task(ClassBasedAutoRetryTask)
