"""`${env:NAME}` is replaced in the child, from the child's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(folder: Path, output: str, env: dict[str, str] | None = None) -> list[dict]:
    spec = {"echo": {"message": output, "report_env": list(env or ())}, "env": env or {}}
    request = {"task_id": "t", "task_type": "echo", "spec": spec, "output_dir": str(folder)}
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


def test_variables_of_env_are_put_together_in_their_order(tmp_path: Path) -> None:
    env = {"ONE": "very ${env:COLOUR}", "TWO": "<${env:ONE}> $${env:ONE}", "PLAIN": "left to the worker"}

    events = run(tmp_path, "${env:TWO}", env)

    (result,) = [event["value"] for event in events if event["event"] == "result"]
    two = "<very blue> ${env:ONE}"
    assert result["environment"] == {"ONE": "very blue", "TWO": two, "PLAIN": None}
    assert result["message"] == two
