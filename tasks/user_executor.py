"""Celery task of the users' own executors: every task type with a dot, such as acme.translate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.celery_app import app
from gpuflow.routing.families import USER_TASK
from gpuflow.worker.ends import ENDS
from gpuflow.worker.supervisor import supervise


@app.task(bind=True, name=USER_TASK, throws=ENDS)
def executor(self: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task of a user's executor under supervision and return its committed result."""
    return supervise(self, spec)
