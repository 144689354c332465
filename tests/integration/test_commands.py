"""The task type `command` on a worker: what a program says, how it ends, what it brings with it and leaves behind."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import ArtifactError, InvalidTemplate, TaskFailed
from gpuflow.fleet.registry import Fleet
from tests.support.fleet import TestFleet, gone
from tests.support.waiting import eventually, patient

BAR = """
import sys, time
for step in range(1, 4):
    sys.stderr.write(f"\\rtrain: {step * 33}%|###   | {step}/3 [00:0{step}<00:01, 1.0it/s]")
    sys.stderr.flush()
print()
print("loss=0.75", flush=True)
print("loss=0.5 accuracy 0.9", flush=True)
open("notes.txt", "w").write("kept")
"""

LEAVES = """
import os, pathlib, sys, time
told = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        told.write_text(str(os.getpid()))
        time.sleep(3600)
    os._exit(0)
while not told.exists() or not told.read_text():
    time.sleep(0.01)
print("done")
"""


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One worker for all tests of this file."""
    long_fleet.start_worker("w1")
    return long_fleet


def command(line: Any, **more: Any) -> dict[str, Any]:
    own = {name: more.pop(name) for name in list(more) if name not in ("retry", "env", "timeout")}
    return {
        "taskType": "command",
        "command": {"command": line, **own},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        **more,
    }


def ran(fleet: TestFleet, spec: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    task = submit(spec, app=fleet.app)
    return task, task.get(timeout=patient(120))


def failed(fleet: TestFleet, spec: dict[str, Any]) -> dict[str, Any]:
    task = submit(spec, app=fleet.app)
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(120))
    error: dict[str, Any] = task.record().error
    return error


def told(fleet: TestFleet, task: Task, name: str) -> list[dict[str, Any]]:
    return [dict(event.data) for event in fleet.app.event_log.read(task.id) if event.name == name]


def test_a_script_without_a_word_of_the_protocol(fleet: TestFleet) -> None:
    metrics = {"loss": r"loss=([0-9.]+)", "accuracy": r"accuracy ([0-9.]+)"}

    task, result = ran(fleet, command(["python", "-c", BAR], metrics=metrics))

    assert (result["exit_code"], result["metrics"]) == (0, {"loss": 0.5, "accuracy": 0.9})
    assert result["output"] == "loss=0.75\nloss=0.5 accuracy 0.9"
    progress = told(fleet, task, "progress")
    assert (3, 3, "it") in [(one["current"], one["total"], one["unit"]) for one in progress]
    assert [one["metrics"] for one in progress if one["metrics"]] == [{"loss": 0.75}, {"loss": 0.5, "accuracy": 0.9}]
    assert (fleet.results / task.id / "notes.txt").read_text() == "kept"
    names = [one["name"] for one in json.loads((fleet.results / task.id / "manifest.json").read_text())["artifacts"]]
    assert names == ["logs/executor.log", "notes.txt", "responses.json"]


def test_a_line_for_the_shell(fleet: TestFleet) -> None:
    _, result = ran(fleet, command("echo $GREETING | tr a-z A-Z; pwd", env={"GREETING": "hello"}))

    first, folder = result["output"].split("\n")
    assert first == "HELLO"
    assert Path(folder).name == "attempt-1"
    assert ran(fleet, command("echo '$HOME'", shell=False))[1]["output"] == "$HOME"


def test_how_it_ends_is_how_the_task_ends(fleet: TestFleet) -> None:
    error = failed(fleet, command("echo one; echo broken >&2; exit 3"))
    assert (error["type"], error["retryable"]) == ("CommandFailed", False)
    assert "exit code 3; its last words:\nbroken" in error["message"]

    missing = failed(fleet, command(["no-such-program"]))
    assert (missing["type"], "'no-such-program' is not on this worker" in missing["message"]) == ("BadInput", True)

    says = json.dumps({"event": "finish", "status": "failed", "error": {"type": "Bad", "message": "no rows"}})
    assert failed(fleet, command(["echo", says]))["type"] == "Bad"
    completed = json.dumps({"event": "finish", "status": "completed"})
    assert failed(fleet, command(f"echo '{completed}'; exit 4"))["type"] == "Contradiction"


def test_a_temporary_failure_is_tried_again(fleet: TestFleet) -> None:
    task, result = ran(fleet, command("test $ATTEMPT = 2 || exit 75; echo done", retry={"backoff_seconds": 0}))

    assert (result["output"], task.record().attempt) == ("done", 2)


def test_what_it_prints_of_a_secret_is_nowhere(fleet: TestFleet) -> None:
    fleet.start_worker("knows", "--label", "box=secret", env={"CANARY": "canary-of-the-command-tests"})
    spec = command("echo it is $CANARY; echo $CANARY >&2") | {"secrets": ["CANARY"]}
    task, result = ran(fleet, spec | {"resources": {"labels": {"box": "secret"}}})

    assert result["output"] == "it is ***"
    stored = [path for path in (fleet.results / task.id).rglob("*") if path.is_file()]
    assert len(stored) >= 3
    assert not any(b"canary-of" in path.read_bytes() for path in stored)


def test_what_goes_on_writing_after_its_end_holds_nothing_up(fleet: TestFleet) -> None:
    _, result = ran(fleet, command("(while :; do echo more; sleep 0.2; done) & echo done"))

    assert result["exit_code"] == 0


def test_a_cancel_ends_it_and_all_that_it_started(fleet: TestFleet) -> None:
    task = submit(command("sleep 3600 & echo started; wait"), app=fleet.app)
    eventually(lambda: "started" in str(told(fleet, task, "log")), what="the program started")
    sleepers = [one for one in psutil.process_iter() if one.name() == "sleep" and _of(one, task.id)]
    assert sleepers

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    eventually(lambda: not any(one.is_running() for one in sleepers), what="the end of what it had started")


def test_what_has_left_its_session_ends_with_the_task(fleet: TestFleet, tmp_path: Path) -> None:
    _, result = ran(fleet, command(["python", "-c", LEAVES, str(tmp_path / "pid")]))

    assert result["output"] == "done"
    gone([int((tmp_path / "pid").read_text())])


def test_a_cancel_lets_a_program_in_a_line_end(fleet: TestFleet, tmp_path: Path) -> None:
    script = tmp_path / "works.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    pathlib.Path(sys.argv[1], 'saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    task = submit(command(f"python {script} {tmp_path}; touch {tmp_path}/went_on"), app=fleet.app)
    eventually(lambda: "ready" in str(told(fleet, task, "log")), what="the program ready")

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "works.py"]


def test_links_of_a_project_stay_in_it(fleet: TestFleet, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text("inside")
    (project / "link.txt").symlink_to("a.txt")
    assert ran(fleet, command("cat link.txt", project=str(project)))[1]["output"] == "inside"

    (tmp_path / "outside.txt").write_text("outside")
    (project / "out.txt").symlink_to("../outside.txt")
    with pytest.raises(ArtifactError, match="leads out of its folder"):
        submit(command("cat out.txt", project=str(project)), app=fleet.app)


def _of(process: psutil.Process, task_id: str) -> bool:
    try:
        return process.environ().get("TASK_ID") == task_id
    except psutil.Error:
        return False


def test_a_project_comes_with_its_requirements(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a project with what is not to be sent, and a requirement that no index has
    wheel = tmp_path / "tiny_greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "tiny_greeting-1.0.dist-info"
        archive.writestr("tiny_greeting.py", "TEXT = 'good morning'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-greeting\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    project = tmp_path / "my project"
    (project / "lib").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / ".git" / "secret").write_text("not sent")
    (project / "lib" / "words.py").write_text("import tiny_greeting\nTEXT = tiny_greeting.TEXT\n")
    (project / "main.py").write_text("import os, lib.words\nprint(lib.words.TEXT, sorted(os.listdir('.')))\n")
    spec = command(["python", "main.py"], project=str(project), requirements=[str(wheel)])

    first, result = ran(fleet, spec)
    second, again = ran(fleet, spec)

    assert result["output"] == "good morning ['lib', 'main.py']" == again["output"]
    statuses = [[one.get("message") for one in told(fleet, task, "worker")] for task in (first, second)]
    assert ["installing 1 requirements" in said for said in statuses] == [True, False]
    assert not (fleet.results / first.id / "work").exists()


def test_one_script_comes_by_itself(fleet: TestFleet, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('#!/bin/sh\necho "$1 from $(basename "$0")"\n')

    assert ran(fleet, command(["./train.sh", "hello"], upload=str(script)))[1]["output"] == "hello from train.sh"


def test_what_cannot_be_sent_is_told_before_anything_is(fleet: TestFleet, tmp_path: Path) -> None:
    for own, problem in (
        ({"project": str(tmp_path / "nowhere")}, "is no folder here"),
        ({"upload": str(tmp_path)}, "a folder"),
        ({"project": "a", "path": "/b"}, "contradict"),
        ({"python": "python3"}, "python without requirements"),
        ({"metrics": {"loss": "loss"}}, "has no group"),
        ({"metrics": {"loss": "("}}, "no regular expression"),
        ({"shell": "bash"}, "absolute path"),
        ({"path": "here"}, "absolute path"),
        ({"requirements": ["six", "-r more.txt"]}, r"requirements\[1\].*is an option of pip"),
        ({"requirements": ["./lib/six-1.0-py3-none-any.whl"]}, "no project"),
    ):
        with pytest.raises(InvalidTemplate, match=problem):
            submit(command("true", **own), app=fleet.app)


def test_requirements_that_cannot_be_installed_say_why(fleet: TestFleet, tmp_path: Path) -> None:
    (tmp_path / "wheel-1.0-py3-none-any.whl").write_text("no archive")
    missing = failed(fleet, command("true", requirements=["/no/such/wheel-1.0-py3-none-any.whl"]))
    broken = failed(fleet, command("true", requirements=[str(tmp_path / "wheel-1.0-py3-none-any.whl")]))

    assert (missing["type"], "no file on this worker" in missing["message"]) == ("BadInput", True)
    assert (broken["type"], broken["retryable"]) == ("InstallFailed", False)
    assert "wheel-1.0" in broken["message"]


def test_after_a_notice_it_goes_on_from_its_checkpoint(fleet: TestFleet) -> None:
    # Given a program that saves where it is when it hears of the notice
    program = """
import json, os, pathlib, signal, sys, time
resumed = os.environ.get("RESUME_FROM")
if resumed:
    print("from", pathlib.Path(resumed, "step.txt").read_text())
    sys.exit(0)
def save(*_):
    folder = pathlib.Path(os.environ["CHECKPOINT_DIR"], "checkpoint-5")
    folder.mkdir(parents=True)
    (folder / "step.txt").write_text("5")
    (folder / "complete.json").write_text("{}")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(3600)
"""
    fleet.start_worker("leaves", "--label", "box=one")
    spec = command(["python", "-c", program]) | {"resources": {"labels": {"box": "one"}}}
    task = submit(spec, app=fleet.app)
    eventually(lambda: "ready" in str(told(fleet, task, "log")), what="the program ready")

    Fleet(fleet.app.redis, fleet.app.keys).ask_to_drain("leaves", 0)
    fleet.start_worker("stays", "--label", "box=one")

    assert task.get(timeout=patient(120))["output"] == "from 5"
    assert task.record().attempt == 2
    assert fleet.app.ledger.attempts(task.id)[0].outcome == "preempted"


@pytest.mark.parametrize(("env", "threads"), [({"OMP_NUM_THREADS": ""}, "2 1.5"), ({"OMP_NUM_THREADS": "1"}, "1 1.5")])
def test_a_program_uses_as_many_threads_as_the_task_has_declared_cpus(
    fleet: TestFleet, env: dict[str, str], threads: str
) -> None:
    show = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['GPUFLOW_CPUS'])"
    spec = command(["python", "-c", show], env=env)
    spec["resources"]["hardware"]["cpu"] = 1.5

    assert ran(fleet, spec)[1]["output"] == threads
