"""A result that is too large for a line goes by a file, from a child of its own and from a session."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executors.base import write_responses
from executors.sessions.channel import RequestEmitter, SessionEmitter
from gpuflow.protocol import RESULT_FILE, Request
from tests.fixtures.executor_child import Child

LARGE = ["é" * 1000] * 5000


def test_a_child_writes_it_to_its_output_folder(start: Callable[..., Child], tmp_path: Path) -> None:
    ended = start("echo", {"echo": {"output": LARGE}}).end()

    assert ended.finish["status"] == "completed"
    assert ended.named("result") == [{"file": RESULT_FILE}]
    (written,) = tmp_path.rglob(RESULT_FILE)
    assert json.loads(written.read_text("utf-8"))["output"] == LARGE
    assert not list(tmp_path.rglob("*.new"))


def test_a_result_that_cannot_be_written_is_a_failure_that_is_told(start: Callable[..., Child], tmp_path: Path) -> None:
    (tmp_path / "out" / RESULT_FILE).mkdir(parents=True)

    ended = start("echo", {"echo": {"output": LARGE}}).end()

    assert ended.error["type"]
    assert ended.code == 1


def test_a_session_writes_it_to_the_folder_of_the_request(tmp_path: Path) -> None:
    stream = io.StringIO()
    emitter = RequestEmitter(SessionEmitter(stream), "r1")
    request = Request(task_id="t", task_type="inference", spec={}, output_dir=str(tmp_path / "r1"))
    value: dict[str, Any] = {"items": LARGE, "loss": float("nan")}

    write_responses(request, emitter, value)
    emitter.result(value)

    last = json.loads(stream.getvalue().splitlines()[-1])
    assert last == {"event": "result", "file": RESULT_FILE, "id": "r1"}
    assert json.loads((tmp_path / "r1" / RESULT_FILE).read_text("utf-8")) == {"items": LARGE, "loss": None}


def test_a_small_one_stays_in_its_line(start: Callable[..., Child], tmp_path: Path) -> None:
    ended = start("echo", {"echo": {"output": "x" * 100_000}}).end()

    assert ended.result["output"] == "x" * 100_000
    assert not list(tmp_path.rglob(RESULT_FILE))
