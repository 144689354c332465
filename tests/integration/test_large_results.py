"""A result of a warm session that no line could carry is in the record of its task."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuflow.client import submit
from gpuflow.protocol import RESULT_FILE
from gpuflow.spec.artifact_reference import is_reference
from tests.support.engines import build
from tests.support.fleet import TestFleet
from tests.support.waiting import patient

#: A session without a model: it answers each request with ten MiB, told of as an Emitter does.
ANSWERS = """
import json, pathlib, sys

def say(event, **data):
    print(json.dumps({"event": event, **data}), flush=True)

opening = json.loads(sys.stdin.readline())
say("ready", engine=opening["engine"], model="m", load_seconds=0.1, max_requests=4, memory_bytes=1, loads=1)
for line in sys.stdin:
    told = json.loads(line)
    if told["op"] == "run":
        value = {"items": ["x" * 1000] * 10_000, "warm": "session" in sys.argv}
        pathlib.Path(told["request"]["output_dir"], ".result.json").write_text(json.dumps(value))
        say("result", file=".result.json", id=told["id"])
        say("finish", status="completed", id=told["id"])
    elif told["op"] == "ping":
        say("pong", n=told["n"])
    elif told["op"] == "close":
        break
say("finish", status="completed")
"""


def test_a_large_result_of_a_session_is_in_the_record(fleet: TestFleet, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    build(tmp_path / "envs", f'#!/bin/sh\nexec {sys.executable} -I {tmp_path}/answers.py "$@"\n')
    fleet.start_worker("w1", env={"GPUFLOW_ENV_DIR": str(tmp_path / "envs"), "GPUFLOW_STATE_DIR": str(tmp_path)})

    task = submit(
        {
            "taskType": "inference",
            "model": {"source": {"type": "local", "identifier": "/models/one"}},
            "data": {"type": "list", "items": ["a"]},
            "resources": {"hardware": {"gpu": {"count": 0}}},
        },
        app=fleet.app,
    )

    result = task.get(timeout=patient(60))
    assert (result["items"], result["warm"]) == (["x" * 1000] * 10_000, True)
    assert is_reference(task.record().result["items"])
    assert not list(fleet.results.rglob(RESULT_FILE))
