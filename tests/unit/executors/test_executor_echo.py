"""The task type echo, and the protocol of every child, by real child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.fixtures.executor_child import ARGV, Child, child_environment, request_json
from tests.support.fleet import running


def test_gives_back_items_output_environment_and_gpus(echo, tmp_path):
    ended = echo(
        {"output": {"answer": 42}, "message": "hé", "report_env": ["GIVEN", "ABSENT"]},
        spec={"data": {"type": "list", "items": ["a", {"b": 1}]}},
        env={"GIVEN": "yes"},
        gpus=("GPU-1", "GPU-2"),
    )

    assert ended.code == 0
    result = ended.result
    assert result["items"] == [
        {"index": 0, "input": "a", "output": "a"},
        {"index": 1, "input": {"b": 1}, "output": {"b": 1}},
    ]
    assert result["output"] == {"answer": 42}
    assert result["answer"] == 42
    assert result["message"] == "hé"
    assert result["environment"] == {"GIVEN": "yes", "ABSENT": None}
    assert result["gpus"] == ["GPU-1", "GPU-2"]
    assert ended.named("artifact") == [{"path": "responses.json"}]
    assert json.loads((tmp_path / "out" / "responses.json").read_text("utf-8")) == result


def test_events_come_in_order(echo):
    ended = echo({"steps": 3, "sleep_seconds": 0.01})

    names = [event.name for event in ended.events]
    assert names == ["connection", "worker", "progress", "progress", "progress", "artifact", "result", "finish"]
    assert [event["current"] for event in ended.named("progress")] == [1, 2, 3]
    assert {event["total"] for event in ended.named("progress")} == {3}


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ({}, None),
        (True, {"type": "EchoFailure", "message": "asked to fail", "retryable": False}),
        ("broken", {"type": "EchoFailure", "message": "broken", "retryable": False}),
        (
            {"type": "Flaky", "message": "later", "retryable": True},
            {"type": "Flaky", "message": "later", "retryable": True},
        ),
    ],
)
def test_fails_as_asked(echo, fail, expected):
    ended = echo({"fail": fail})

    if expected is None:
        assert ended.finish == {"status": "completed"}
    else:
        assert (ended.code, ended.error) == (1, expected)
        assert ended.named("result") == []


@pytest.mark.parametrize(("attempt", "code"), [(1, 1), (2, 1), (3, 0)])
def test_fails_in_the_first_attempts_alone(echo, attempt, code):
    assert echo({"fail": {"attempts": 2}}, attempt=attempt).code == code


def test_exit_code_can_contradict_the_finish_event(echo):
    ended = echo({"exit_code": 7})

    assert ended.code == 7
    assert ended.finish == {"status": "completed"}


@pytest.mark.parametrize("exit_code", [0, 3])
def test_silent_ends_without_a_finish_event(echo, exit_code):
    ended = echo({"silent": True, "exit_code": exit_code})

    assert ended.code == exit_code
    assert ended.named("finish") == []
    assert len(ended.named("result")) == 1


def test_garbage_on_stdout_does_no_harm(echo):
    ended = echo({"stdout_garbage": True, "stderr": "to the log"})

    assert ended.finish == {"status": "completed"}
    assert len(ended.named("log")) >= 7
    assert "to the log" in ended.log


def test_prints_of_a_library_go_to_the_log(tmp_path):
    request = request_json("echo", {}, tmp_path)
    code = (
        "import sys, runpy, executors.echo as e\n"
        "real = e._result\n"
        "def loud(*a):\n"
        "    print('a library prints')\n"
        "    return real(*a)\n"
        "e._result = loud\n"
        "runpy.run_module('executors', run_name='__main__')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], input=request.encode(), capture_output=True, env=child_environment(), check=True
    )

    assert b"a library prints" in done.stderr
    assert all(json.loads(line) for line in done.stdout.splitlines())


def test_sigterm_ends_a_sleep_at_once_as_cancelled(start):
    child = start("echo", {"echo": {"sleep_seconds": 3600}})
    child.until("worker", status="working")

    child.signal(signal.SIGTERM)
    ended = child.end()

    assert ended.code == 143
    assert ended.finish == {"status": "cancelled"}
    assert ended.named("result") == []


def test_works_until_a_path_exists(start, tmp_path):
    gate = tmp_path / "gate"
    child = start("echo", {"echo": {"until_exists": str(gate)}})
    child.until("worker", status="working")
    assert running([child.pid]) == [child.pid]

    gate.touch()

    assert child.end().finish == {"status": "completed"}


def test_the_last_step_waits_for_the_path_and_a_notice_ends_the_wait(start, tmp_path):
    gate = tmp_path / "gate"
    child = start("echo", {"echo": {"steps": 1, "checkpoint_steps": 1000, "until_exists": str(gate)}})
    child.until("worker", status="working")

    child.signal(signal.SIGUSR1)
    ended = child.end()

    assert ended.finish["error"]["type"] == "Preempted"
    assert [event["current"] for event in ended.named("progress")] == [1]


def test_sigterm_can_be_ignored(start):
    child = start("echo", {"echo": {"sleep_seconds": 0.3, "steps": 3, "ignore_sigterm": True}})
    child.until("progress", current=1)

    child.signal(signal.SIGTERM)

    assert child.end().finish == {"status": "completed"}


def test_children_are_left_behind(start):
    child = start("echo", {"echo": {"children": 2}})
    pids = child.until("log").data["pids"]
    try:
        for pid in pids:
            os.kill(pid, 0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    assert child.end().result["children"] == pids


def test_writes_an_artifact_of_the_size_asked(echo, tmp_path):
    ended = echo({"artifact": "deep/file.bin", "artifact_bytes": 1_500_000})

    assert {"path": "deep/file.bin"} in ended.named("artifact")
    assert (tmp_path / "out" / "deep" / "file.bin").stat().st_size == 1_500_000


def test_a_lone_surrogate_is_replaced(tmp_path):
    child = Child('{"task_id": "t", "task_type": "echo", "output_dir": "OUT", "spec": {"echo": {"message": "\\ud800"}}}'
                  .replace("OUT", str(tmp_path)))  # fmt: skip
    try:
        assert child.end().result["message"] == "?"
    finally:
        child.close()


@pytest.mark.parametrize(
    "stdin",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"task_id": "t", "task_type": "echo", "output_dir": "/tmp"}',
        '{"task_id": "t", "task_type": "echo", "output_dir": "/tmp", "spec": []}',
        '{"task_id": "t", "task_type": 7, "output_dir": "/tmp", "spec": {}}',
        '{"task_id": "t", "task_type": "echo", "output_dir": "/tmp", "spec": {}, "gpus": 7}',
        "[" * 100_000,
    ],
)
def test_a_bad_request_is_told(stdin):
    child = Child(stdin)
    try:
        ended = child.end()
    finally:
        child.close()

    assert ended.code == 2
    assert ended.error["type"] == "BadRequest"
    assert not ended.error["retryable"]


def test_stdin_that_is_no_utf8_is_told():
    done = subprocess.run(ARGV, input=b"\xff\xfe", capture_output=True, env=child_environment(), check=False)

    assert done.returncode == 2
    assert b"BadRequest" in done.stdout


def test_an_unknown_task_type_is_told(start):
    ended = start("dance", {}).end()

    assert ended.code == 2
    assert ended.error["type"] == "UnknownTaskType"
    assert "echo" in ended.error["message"]


def test_an_output_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    child = Child(request_json("echo", {}, tmp_path / "file" / "out"))
    try:
        ended = child.end()
    finally:
        child.close()

    assert ended.code == 1
    assert ended.error["type"] == "NotADirectoryError"
    assert "Traceback" in ended.log


def test_an_echo_child_imports_nothing_heavy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "executors"],
        input=request_json("echo", {}, tmp_path).encode(),
        capture_output=True,
        env=child_environment(),
        check=True,
    )

    imported = {line.rsplit(b"|", 1)[-1].strip().split(b".")[0] for line in done.stderr.splitlines()}
    assert b"gpuflow" in imported
    assert not imported & {b"pydantic", b"torch", b"yaml", b"celery", b"redis", b"numpy", b"transformers", b"structlog"}
