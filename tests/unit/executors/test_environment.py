"""`${env:NAME}` is replaced in the child, from the child's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(folder: Path, output: str) -> list[dict]:
    request = {"task_id": "t", "task_type": "echo", "spec": {"echo": {"message": output}}, "output_dir": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "executors"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLOUR": "blue"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_variable_is_replaced_and_an_escape_undone(tmp_path: Path) -> None:
    events = run(tmp_path, "sky ${env:COLOUR}, $${env:COLOUR}")

    (result,) = [event["value"] for event in events if event["event"] == "result"]
    assert result["message"] == "sky blue, ${env:COLOUR}"


def test_a_variable_that_is_not_set_fails_the_task_and_is_named(tmp_path: Path) -> None:
    events = run(tmp_path, "${env:NOT_SET_ANYWHERE}")

    assert events[-1]["status"] == "failed"
    assert "NOT_SET_ANYWHERE" in events[-1]["error"]["message"]
