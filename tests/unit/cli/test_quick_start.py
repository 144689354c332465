"""What a command loads before it can show anything."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("entry", ["gpuflow.client", "gpuflow.celery_app", "gpuflow.explaining", "gpuflow.bulk"])
def test_what_shows_tasks_loads_neither_the_models_of_templates_nor_what_writes_logs(entry: str) -> None:
    late = ["gpuflow.spec.models_task", "structlog", "rich.console"]
    script = f"import sys; import {entry}; print(*[one for one in {late} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
