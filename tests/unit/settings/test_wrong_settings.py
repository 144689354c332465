"""A process of Celery with a setting that cannot be used ends with one line that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", ["worker", "beat", "flower", "inspect"])
def test_a_wrong_setting_is_one_line_and_exit_code_2(program: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "celery", "-A", "gpuflow", program, *(["ping"] if program == "inspect" else [])]
    env = {**os.environ, "GPUFLOW_LEASE_SEC": "soon", "REDIS_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("Error: GPUFLOW_LEASE_SEC is 'soon'") and "give seconds, such as 60" in last
    assert "Traceback" not in done.stderr
