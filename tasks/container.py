"""Celery task of the family container: any container image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.celery_app import app
from gpuflow.worker.ends import ENDS
from gpuflow.worker.supervisor import supervise


@app.task(bind=True, name="gpuflow.container", throws=ENDS)
def container(self: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task of this family under supervision and return its committed result."""
    return supervise(self, spec)
