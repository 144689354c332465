"""Makes every task of Celery's integration tests a child: `celery -A gpuflow worker --include celerys_own_children`.

Imported by the tests, by the worker, and by each child, as what a task sends is to run in children, too.
"""

from __future__ import annotations

import celerys_own_control  # noqa: F401  (its command)
from t.integration.tasks import ClassBasedAutoRetryTask

from gpuflow import app
from gpuflow.task import GPUTask

GPUTask.child = True
app.register_task(ClassBasedAutoRetryTask)
