"""`gpuflow executor`: one request run by itself, as a person at a terminal would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.executor_child import ROOT, child_environment
from tests.support.waiting import patient

EXAMPLE = ROOT / "examples" / "executor"
HERE = {"GPUFLOW_EXECUTORS": f"acme.wordcount={EXAMPLE}/acme_wordcount/executor.py:WordCount"}


class Terminal:
    """Runs `gpuflow executor` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", "from gpuflow.cli import main; main()", "executor", *arguments]
        self.started.append(
            subprocess.Popen(
                argv,
                cwd=self.folder,
                env=child_environment({"GPUFLOW_GRACE_SEC": "60", **(env or {})}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def run(self, *arguments: str, request: Any = None, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        process = self.start(*arguments, env=env)
        out, err = process.communicate(None if request is None else json.dumps(request))
        return process.returncode, out, err

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


def echo(**fields: Any) -> dict[str, Any]:
    return {"taskType": "echo", "echo": fields}


def test_the_result_is_on_stdout_and_all_else_on_stderr(terminal: Terminal, tmp_path: Path) -> None:
    code, out, err = terminal.run("run", "-", "-o", "out", request=echo(output=7, steps=2, stderr="a line of the log"))

    assert code == 0
    assert json.loads(out)["output"] == 7
    assert "a line of the log" in err
    assert "step 2 of 2" in err
    assert "completed in" in err and str(tmp_path / "out") in err
    assert json.loads((tmp_path / "out" / "responses.json").read_text())["output"] == 7


def test_json_gives_every_event_as_a_line_and_the_end_last(terminal: Terminal) -> None:
    code, out, _ = terminal.run("run", "-", "--json", request=echo(steps=2, stdout_garbage=True))

    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert events[0] == {"event": "connection", "status": "connected"}
    assert [one["current"] for one in events if one["event"] == "progress"] == [1, 2]
    assert "plain text" in [one.get("message") for one in events]
    assert events[-2] == {"event": "finish", "status": "completed"}
    assert events[-1]["event"] == "ended"
    assert events[-1]["completed"] is True
    assert events[-1]["artifacts"] == ["responses.json"]


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (echo(fail={"type": "Boom", "message": "no luck"}), 1, "Boom: no luck"),
        (echo(exit_code=3), 1, "Contradiction"),
        (echo(silent=True), 1, "NoFinish"),
        ({**echo(sleep_seconds=60), "timeout": 0.5}, 1, "TimeLimitExceeded"),
        ({**echo(), "data": {"type": "jsonl", "path": "/no/such/file.jsonl"}}, 2, "BadInput"),
        ({"taskType": "acme.unknown"}, 2, "no executor is registered"),
        ({"taskType": "ecko"}, 2, "did you mean"),
        ({"taskType": "echo", "ecko": 1}, 2, "ecko"),
        ({"spec": 3}, 2, "spec of - is no JSON object"),
        ({"a": 1}, 2, "is no request"),
        ({"task_type": "inference", "spec": {"taskType": "echo"}}, 2, "keep one of them"),
    ],
)
def test_exit_codes_tell_a_failure_from_bad_input(terminal: Terminal, request_: Any, code: int, said: str) -> None:
    ended, out, err = terminal.run("run", "-", request=request_)

    assert (ended, out) == (code, "")
    assert said in err
    assert err.count("Traceback") <= 1  # that of the child, in its log


def test_a_file_that_is_not_there_is_one_line(terminal: Terminal) -> None:
    code, _, err = terminal.run("run", "nothing.json")

    assert code == 1
    assert "nothing.json" in err
    assert len(err.splitlines()) == 1


def test_a_whole_request_is_taken_too(terminal: Terminal, tmp_path: Path) -> None:
    request = {
        "task_id": "mine",
        "attempt": 3,
        "spec": echo(report_env=["TASK_ID", "REDIS_URL"]),
        "output_dir": "there",
    }

    code, out, _ = terminal.run("run", "-", request=request, env={"REDIS_URL": "redis://127.0.0.1:1/0"})

    assert code == 0
    result = json.loads(out)
    assert (result["environment"], result["attempt"]) == ({"TASK_ID": "mine", "REDIS_URL": None}, 3)
    assert (tmp_path / "there" / "responses.json").is_file()


def test_the_children_of_a_merged_request_are_run(terminal: Terminal) -> None:
    children = [{"id": "a", "spec": {"data": {"items": [1]}}}, {"id": "b", "spec": echo(fail={"message": "no"})}]

    code, out, _ = terminal.run("run", "-", request={"taskType": "echo", "merge_children": children})

    assert code == 0
    assert json.loads(out)["children"]["b"]["error"]["message"] == "no"


def test_the_example_request_runs_the_example_executor(terminal: Terminal) -> None:
    code, out, _ = terminal.run("run", str(EXAMPLE / "request.json"), env=HERE)

    assert code == 0
    assert json.loads(out)["items"][1]["output"] == {"a": 3, "rose": 3}


@pytest.mark.parametrize("stubborn", [False, True])
def test_ctrl_c_stops_the_tree(terminal: Terminal, tmp_path: Path, stubborn: bool) -> None:
    (tmp_path / "r.json").write_text(
        json.dumps(echo(sleep_seconds=600, children=2, ignore_sigterm=stubborn, steps=1000))
    )
    process = terminal.start("run", "r.json", "--json")
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        event = json.loads(line)
        pids += event.get("pids") or []
        if event["event"] == "progress":
            break
    tree = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "once more to kill it" in process.stderr.readline()
    if stubborn:
        process.send_signal(signal.SIGINT)
    out = process.stdout.read()

    assert process.wait(timeout=patient(60)) == 130
    assert json.loads(out.splitlines()[-1])["error"]["type"] == "Cancelled"
    assert len(pids) == 2
    assert [one.pid for one in tree if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_the_list_has_ours_and_yours_and_says_what_is_wrong(terminal: Terminal) -> None:
    env = {"GPUFLOW_EXECUTORS": f"{HERE['GPUFLOW_EXECUTORS']},acme.none=./none.py:None_"}

    code, out, _ = terminal.run("list", "--json", env=env)

    assert code == 0
    rows = {row["task_type"]: row for row in json.loads(out)}
    assert {"echo", "inference", "sft", "lora_sft"} <= set(rows)
    assert rows["acme.wordcount"]["problem"] == ""
    assert rows["acme.wordcount"]["environment"] == "default"
    assert "there is no file" in rows["acme.none"]["problem"]
    _, out, err = terminal.run("list", env=env)
    assert "acme.wordcount" in out
    assert "acme.none: " in err


def test_a_result_of_many_mib_is_on_stdout_too(terminal: Terminal) -> None:
    code, out, _ = terminal.run("run", "-", request=echo(output=["x" * 1000] * 9000))

    assert code == 0
    assert json.loads(out)["output"] == ["x" * 1000] * 9000


PLACES = """
from executors.base import Executor

class Places(Executor):
    task_types = ("acme.places",)

    def run(self, request, emitter):
        return {"checkpoint": request.checkpoint_path, "data": request.spec.get("data")}
"""


def test_inputs_are_brought_here_as_by_a_worker(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "places.py").write_text(PLACES)
    env = {"GPUFLOW_EXECUTORS": "acme.places=./places.py:Places", "WEIGHTS": str(tmp_path / "weights")}
    spec = {
        "taskType": "acme.places",
        "env": {"PLACE": "${env:WEIGHTS}"},
        "secrets": ["WEIGHTS"],
        "checkpoint": {"load": {"path": "${env:PLACE}"}},
        "data": {"type": "jsonl", "url": (tmp_path / "rows.jsonl").as_uri()},
    }

    code, out, err = terminal.run("run", "-", request=spec, env=env)

    assert code == 0, err
    assert json.loads(out) == {
        "checkpoint": str(tmp_path / "weights"),
        "data": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")},
    }
