"""Celery task of the family command: any script or project folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.celery_app import app
from gpuflow.worker.ends import ENDS
from gpuflow.worker.supervisor import supervise


@app.task(bind=True, name="gpuflow.command", throws=ENDS)
def command(self: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task of this family under supervision and return its committed result."""
    return supervise(self, spec)
