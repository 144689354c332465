"""A notice (SIGUSR1): the child ends soon, with what it can save, and says that another attempt is to go on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from executors import cancellation
from gpuflow.protocol import complete_checkpoints
from tests.fixtures.executor_child import child_environment, request_json
from tests.support.waiting import patient

STEPS = {"steps": 100, "sleep_seconds": 10, "checkpoint_steps": 1000}


@pytest.fixture
def state(monkeypatch):
    for name, value in (("raised", None), ("noticed", False), ("held", False)):
        monkeypatch.setattr(cancellation._State, name, value)


def notice():
    cancellation._on_notice(signal.SIGUSR1, None)


def test_a_task_that_saves_nothing_ends_at_once(start):
    child = start("echo", {"echo": {"sleep_seconds": 3600}})
    child.until("worker", status="working")

    child.signal(signal.SIGUSR1)
    ended = child.end()

    assert ended.code == 143
    message = "the worker gave notice; nothing was saved"
    error = {"type": "Preempted", "message": message, "retryable": True}
    assert ended.finish == {"status": "cancelled", "error": error}
    assert ended.named("result") == []


def test_a_task_that_saves_goes_on_in_the_next_attempt(start, tmp_path):
    child = start("echo", {"echo": STEPS})
    child.until("progress", current=3)

    child.signal(signal.SIGUSR1)
    ended = child.end()

    (told,) = ended.named("checkpoint")
    assert 3 <= told["step"] < 100
    assert [str(path) for path in complete_checkpoints(tmp_path / "out" / "checkpoints")] == [told["path"]]
    assert (ended.code, ended.finish["status"], ended.finish["error"]["type"]) == (143, "cancelled", "Preempted")

    rest = {"echo": {**STEPS, "sleep_seconds": 0}}
    again = start("echo", rest, env={"RESUME_FROM": told["path"]}, checkpoint_dir=str(tmp_path / "2")).end()
    assert again.result["resumed_from_step"] == told["step"]
    assert [event["current"] for event in again.named("progress")] == list(range(told["step"] + 1, 101))


def test_checkpoints_come_without_a_notice_too(echo, tmp_path):
    ended = echo({"steps": 5, "checkpoint_steps": 2})

    assert [event["step"] for event in ended.named("checkpoint")] == [2, 4]
    assert ended.result["resumed_from_step"] is None
    kept = tmp_path / "out" / "checkpoints"
    again = echo({"steps": 5, "checkpoint_steps": 2}, resume_from=str(kept), checkpoint_dir=str(tmp_path / "2"))
    assert again.result["resumed_from_step"] == 4


def test_a_checkpoint_that_is_gone_is_told(echo, tmp_path):
    error = echo({"checkpoint_steps": 1}, resume_from=str(tmp_path / "gone")).error

    assert (error["type"], error["retryable"]) == ("CheckpointMissing", True)


def test_a_notice_can_be_ignored(start):
    child = start("echo", {"echo": {"steps": 3, "sleep_seconds": 0.3, "ignore_notice": True}})
    child.until("progress", current=1)

    child.signal(signal.SIGUSR1)

    assert child.end().finish == {"status": "completed"}


def test_a_cancel_after_a_notice_does_not_wait_for_the_step(start):
    child = start("echo", {"echo": {"steps": 1, "sleep_seconds": 3600, "checkpoint_steps": 1}})
    child.until("worker", status="working")

    child.signal(signal.SIGUSR1)
    child.signal(signal.SIGTERM)

    assert child.end().finish == {"status": "cancelled"}


def test_a_notice_while_libraries_are_imported_ends_the_child(tmp_path):
    code = (
        "import os, signal, runpy, executors.registry as registry\n"
        "def imports(task_type):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    raise AssertionError('the import went on')\n"
        "registry.find = imports\n"
        "runpy.run_module('executors', run_name='__main__')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        input=request_json("echo", {}, tmp_path).encode(),
        capture_output=True,
        env=child_environment(),
        check=False,
    )

    assert done.returncode == 143
    assert b'"type": "Preempted"' in done.stdout.splitlines()[-1]


def test_a_library_that_swallows_the_notice_does_not_hide_it(state):
    with pytest.raises(cancellation.Preempted):
        notice()

    with pytest.raises(cancellation.Preempted):
        cancellation.check()
    with pytest.raises(cancellation.Preempted), cancellation.notice_held():
        raise AssertionError("work began after a notice")


def test_a_second_signal_does_not_disturb_the_end(state):
    with pytest.raises(cancellation.Preempted):
        notice()

    cancellation._on_cancel(signal.SIGTERM, None)
    notice()


def test_a_held_notice_raises_nothing(state):
    with cancellation.notice_held():
        notice()
        assert cancellation.noticed()
        cancellation.check()
    notice()
    cancellation.check()


BLOCKED = """
import signal, sys, threading
from executors import cancellation

cancellation.install()
def tell():  # the handler runs in this thread, so nothing interrupts the main one
    signal.pthread_kill(threading.get_ident(), signal.Signals[sys.argv[1]])
threading.Timer(0.3, tell).start()
try:
    threading.Event().wait(3600)
except cancellation.Cancelled as end:
    print(type(end).__name__)
"""


@pytest.mark.parametrize(("name", "raised"), [("SIGUSR1", "Preempted"), ("SIGTERM", "Cancelled")])
def test_a_signal_that_interrupts_nothing_is_noticed(name, raised):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, name],
        capture_output=True,
        text=True,
        timeout=patient(60),
        env=child_environment(),
    )
    assert (done.stdout.strip(), done.stderr) == (raised, "")
