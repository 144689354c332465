"""The `gpuflow` command as a user types it: real processes, the embedded server, a real worker, echo pipelines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gate import leftovers
from tests.integration.conftest import OPTIONS
from tests.support.fleet import TestFleet, gone, keep_log, running
from tests.support.waiting import eventually, patient, promised

GPUFLOW = [sys.executable, "-c", "from gpuflow.cli import main; main()"]


def pipeline(*stages: dict[str, Any], name: str = "demo") -> dict[str, Any]:
    return {
        "apiVersion": "gpuflow/v1",
        "kind": "Pipeline",
        "metadata": {"name": name},
        "spec": {"taskType": "echo", "stages": list(stages)},
    }


def stage(name: str, *items: str, **echo: Any) -> dict[str, Any]:
    return {"name": name, "spec": {"data": {"type": "list", "items": list(items) or ["x"]}, "echo": echo}}


@dataclass(frozen=True)
class Log:
    """What a command has said."""

    log_path: Path


class Shell:
    """Runs the command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.logs: list[Log] = []
        without = {name for name in os.environ if name.startswith("GPUFLOW_") or name in ("REDIS_URL", "WORKER_ID")}
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in without},
            "GPUFLOW_STATE_DIR": str(folder / "state"),
            "GPUFLOW_CACHE_DIR": str(folder / "cache"),
            "GPUFLOW_GRACE_SEC": "2",
            **leftovers.passed_on(),
            "PYTHONUNBUFFERED": "1",
        }

    def write(self, template: dict[str, Any], name: str = "t.json") -> str:
        (self.folder / name).write_text(json.dumps(template))
        return name

    def __call__(self, *arguments: str, code: int | None = 0, within: float = 90) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*GPUFLOW, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=patient(within),
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *arguments: str, code: int | None = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def start(self, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
        out = self.folder / f"out-{len(self.started)}.txt"
        self.logs.append(Log(out))
        keep_log(self.logs[-1])
        with out.open("w") as stream:
            process = subprocess.Popen(
                [*GPUFLOW, *arguments], cwd=self.folder, env=self.environment, stdout=stream, stderr=stream, text=True
            )
        self.started.append(process)
        return process, out

    def until(self, process: subprocess.Popen[str], out: Path, text: str, within: float = 60) -> str:
        """Wait until the output holds `text`; fail at once when the process ends before."""

        def there() -> bool:
            if text in out.read_text():
                return True
            assert process.poll() is None, out.read_text()
            return False

        eventually(there, within=within, what=f"{text!r} in the output")
        return out.read_text()

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker that one worker serves, for all tests of this module that need one."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=OPTIONS)
    try:
        made.start_worker("w1", "--max-jobs", "2")
        yield made
    finally:
        made.close()


@pytest.fixture
def served(fleet: TestFleet, shell: Shell) -> Shell:
    """A shell with REDIS_URL set to the broker of the fleet."""
    shell.environment.update(REDIS_URL=fleet.broker.url, RESULTS_DIR=str(fleet.results))
    return shell


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def test_run_shows_the_stages_and_their_results(shell: Shell) -> None:
    path = shell.write(
        pipeline(stage("one", "a", "b", steps=2), stage("two", "got ${one.items[1].output}"), stage("three", "end"))
    )
    done = shell("run", path)
    for text in ("one: succeeded", "two: succeeded", "three: succeeded", "pipeline succeeded", "got b"):
        assert text in done.stdout
    assert str(shell.folder / "results_workers") in done.stdout
    run_id = shell.json("status")["pipelines"][0]["id"]
    assert [item["state"] for item in shell.json("status", run_id)["stages"]] == ["SUCCEEDED"] * 3
    result = shell.json("result", run_id)
    assert result["stages"][1]["result"]["items"][0]["output"] == "got b"
    assert "got b" in shell("result", run_id).stdout
    told = shell("logs", run_id).stdout
    assert "] one STARTING attempt 1 on local-" in told
    assert {event["stage"] for event in shell.json("logs", run_id)} == {"", "one", "two", "three"}
    assert [task["queue"] for task in shell.json("explain", run_id)] == ["cpu"] * 3
    assert shell.json("workers") == []
    ours = {"gpuflow.control", "gpuflow.notices", "gpuflow.callbacks"}
    assert {queue["name"] for queue in shell.json("queues")} == {"cpu", "tasks", *ours}


def test_run_json_is_one_document_and_options_reach_the_template(shell: Shell) -> None:
    path = shell.write(pipeline(stage("one", "a")))
    shown = shell.json("run", path, "--set", "stages.one.data.items=[x, y]", "--set", "metadata.name=other")
    assert (shown["name"], shown["state"]) == ("other", "SUCCEEDED")
    assert [item["output"] for item in shown["stages"][0]["result"]["items"]] == ["x", "y"]


def test_a_failing_stage_is_exit_1_with_its_cause(shell: Shell) -> None:
    fail = {"type": "Boom", "message": "no disk \x1b[31mleft"}
    path = shell.write(pipeline(stage("one", "a"), stage("two", fail=fail), stage("three"), stage("four")))
    done = shell("run", path, code=1)
    assert "no disk left" in done.stderr
    assert "three: failed: stage 'two' failed: no disk left" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    run_id = shell.json("status")["pipelines"][0]["id"]
    assert shell("result", run_id, code=1).stderr.startswith("gpuflow: stage 'two' failed: no disk left")
    assert shell("status", run_id, "--watch", code=1).stdout


def test_ctrl_c_leaves_no_process_and_resume_finishes(shell: Shell) -> None:
    gate = shell.folder / "gate"
    two = stage("two", "b", until_exists=str(gate), children=2)
    path = shell.write(pipeline(stage("one", "a"), two, stage("three", "${two.items[0].output}")))
    process, out = shell.start("run", path)
    told = shell.until(process, out, "two: started")
    run_id = told.split("pipeline ")[1].split()[0]
    pids = family(process.pid)
    assert len(pids) > 3
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 130
    promised(running(pids) == [], "processes of the command are left")
    assert f"resume with `gpuflow resume {run_id}`" in out.read_text()
    shown = shell.json("status", run_id)
    assert [item["state"] for item in shown["stages"]] == ["SUCCEEDED", "DISPATCHED", "PENDING"]
    assert shown["state"] == "RUNNING"
    gate.touch()
    done = shell("resume", run_id)
    assert "three: succeeded" in done.stdout
    assert [item["state"] for item in shell.json("status", run_id)["stages"]] == ["SUCCEEDED"] * 3
    attempts = [item["tasks"][0]["attempt"] for item in shell.json("status", run_id)["stages"]]
    assert attempts == [1, 2, 1]


def test_a_second_ctrl_c_kills(shell: Shell) -> None:
    shell.environment["GPUFLOW_GRACE_SEC"] = "120"
    path = shell.write(pipeline(stage("deaf", sleep_seconds=600, ignore_sigterm=True)))
    process, out = shell.start("run", path)
    shell.until(process, out, "deaf: started")
    pids = family(process.pid)
    process.send_signal(signal.SIGINT)
    shell.until(process, out, "stopping")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 130
    promised(running(pids) == [], "processes of the command are left")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a dead parent is Linux's")
def test_nothing_outlives_a_killed_run(shell: Shell) -> None:
    path = shell.write(pipeline(stage("long", sleep_seconds=600, children=2)))
    process, out = shell.start("run", path)
    shell.until(process, out, "long: started")
    pids = family(process.pid)
    process.kill()
    process.wait()
    gone(pids)


def test_a_worker_that_cannot_start_is_an_error_with_its_log(shell: Shell) -> None:
    shell.environment["WORKER_ID"] = "has:colon"
    done = shell("run", shell.write(pipeline(stage("one"))), code=1)
    assert "gpuflow: has:colon ended with exit code" in done.stderr
    assert "cannot name a worker" in done.stderr
    assert shell.json("status") == {"pipelines": [], "tasks": []}


def test_submit_watch_and_steer_on_a_fleet(served: Shell, fleet: TestFleet) -> None:
    quick = served.write(pipeline(stage("one", "a"), name="quick"))
    run_id = served("submit", quick, "--idempotency-key", "k1").stdout.strip()
    assert served("status", run_id, "--watch").returncode == 0
    assert served("submit", quick, "--idempotency-key", "k1").stdout.strip() == run_id
    shown = served.json("submit", quick, "--wait")
    assert shown["state"] == "SUCCEEDED"
    assert "one SUCCEEDED" in served("logs", run_id, "-f").stdout
    assert served("result", run_id).returncode == 0
    assert served("resume", run_id).stderr.startswith(f"{run_id} has succeeded")
    [worker] = served.json("workers")
    assert worker["id"] == "w1"
    assert served.json("workers", "show", "w1")["id"] == "w1"
    assert served("workers", "show", "w2", code=2).stderr
    assert "w1" in served("workers").stdout
    assert next(queue for queue in served.json("queues") if queue["name"] == "cpu")["workers"] == ["w1"]
    checks = {check["name"]: check["status"] for check in served.json("doctor", code=None)["checks"]}
    assert {checks[name] for name in ("broker", "persistence", "eviction", "workers")} == {"ok"}


def test_a_task_is_cancelled_and_tried_again(served: Shell, fleet: TestFleet) -> None:
    gate = str(served.folder / "gate")
    task = {"taskType": "echo", "echo": {"fail": {"type": "Boom", "message": "gone", "unless_exists": gate}}}
    task_id = served("submit", served.write(task)).stdout.strip()
    eventually(lambda: fleet.state(task_id) == "FAILED")
    assert "gone" in served("result", task_id, code=1).stderr
    Path(gate).touch()
    assert "queued again" in served("retry", task_id).stdout
    served("status", task_id, "--watch")
    assert fleet.state(task_id) == "SUCCEEDED"
    assert served.json("result", task_id)["items"] == []
    assert served("retry", task_id, code=1).stderr.startswith(f"gpuflow: {task_id} is SUCCEEDED")
    assert "had ended before" in served("cancel", task_id).stdout

    far = {"taskType": "echo", "resources": {"hardware": {"cpu": 1}, "labels": {"place": "moon"}}}
    waiting = served("submit", served.write(far)).stdout.strip()
    [explained] = served.json("explain", waiting)
    assert explained["workers"][0]["fits"] is False
    assert "place" in explained["workers"][0]["reasons"][0]
    assert served.json("result", waiting, code=1) is None
    assert served.json("cancel", waiting)["verdict"] == "cancelled"
    assert served("status", waiting, "--watch", code=1).stderr

    slow = served("submit", served.write({"taskType": "echo", "echo": {"sleep_seconds": 600}})).stdout.strip()
    eventually(lambda: fleet.state(slow) == "RUNNING")
    assert served.json("cancel", slow)["verdict"] == "requested"
    assert served("status", slow, "--watch", code=1).returncode == 1
    assert fleet.state(slow) == "CANCELLED"


def test_to_stop_watching_cancels_nothing(served: Shell, fleet: TestFleet) -> None:
    path = served.write(pipeline(stage("slow", sleep_seconds=600)))
    process, out = served.start("submit", path, "--wait")
    told = served.until(process, out, "slow: started")
    run_id = next(word for word in told.split() if len(word) == 36)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 130
    assert "nothing was cancelled" in out.read_text()
    following, text = served.start("logs", run_id, "-f")
    served.until(following, text, "STARTING")
    following.send_signal(signal.SIGINT)
    assert following.wait(timeout=patient(30)) == 130
    assert served.json("status", run_id)["state"] == "RUNNING"
    assert served("retry", run_id, code=2).stderr
    assert "is cancelled" in served("cancel", run_id).stdout
    assert "goes on" in served("resume", run_id).stderr
    served("cancel", run_id)


def test_the_fleet_is_watched_until_ctrl_c_and_what_it_used_is_summed(served: Shell, fleet: TestFleet) -> None:
    process, out = served.start("status", "--watch")
    served.until(process, out, "workers: 1 idle | waiting: 0 | running: 0")
    ended = out.read_text()
    served("submit", served.write({"taskType": "echo", "echo": {"output": 1}}), "--wait")
    eventually(lambda: out.read_text() != ended and "succeeded" in out.read_text(), what="the end of the task")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 130
    assert "needs the ID" in served("status", "--watch", "--json", code=2).stderr
    found = served.json("usage", "--by", "type", "--since", "1d")
    (row,) = (row for row in found["rows"] if row["name"] == "echo")
    assert row["tasks"] >= 1 and row["seconds"] > 0 and found["total"]["seconds"] >= row["seconds"]
    assert "WORKER" in served("usage", "--by", "worker").stdout
    assert "is not a duration" in served("usage", "--since", "ever", code=2).stderr


def test_run_on_an_external_broker_leaves_it_alone(served: Shell, fleet: TestFleet) -> None:
    assert "pipeline succeeded" in served("run", served.write(pipeline(stage("one", "a")))).stdout
    assert fleet.broker.client.ping()
    assert not (served.folder / "state" / "embedded").exists()
    assert [worker["id"] for worker in served.json("workers")] == ["w1"]


def test_target_auto_takes_the_fleet_or_this_machine(served: Shell, fleet: TestFleet) -> None:
    path = served.write(pipeline(stage("one", "a")))
    assert len(served("submit", path, "--target", "auto").stdout.split()) == 1
    del served.environment["REDIS_URL"]
    assert "pipeline succeeded" in served("submit", path, "--target", "auto").stdout
    assert "gpuflow up" in served("submit", path, code=1).stderr


def test_a_command_runs_here_where_its_template_says_so(shell: Shell) -> None:
    no_gpu = {"hardware": {"gpu": {"count": 0}}}
    spec = {"taskType": "command", "target": "local", "command": "echo it ran $((6 * 7)) times", "resources": no_gpu}
    path = shell.write({"apiVersion": "gpuflow/v1", "kind": "Task", "metadata": {"name": "here"}, "spec": spec})

    done = shell.json("submit", path)

    assert done["state"] == "SUCCEEDED"
    assert done["stages"][0]["result"]["output"] == "it ran 42 times"


def test_stages_that_are_to_run_in_several_places_are_refused(shell: Shell) -> None:
    one, two = stage("one", "a"), stage("two", "b")
    two["spec"]["target"] = "local"

    assert "is local, and that of 'one' is worker" in shell("submit", shell.write(pipeline(one, two)), code=2).stderr


def test_a_task_that_is_split_is_submitted_as_a_pipeline(served: Shell) -> None:
    spec = {"taskType": "echo", "data": {"items": ["a", "b", "c"]}, "parallel": {"max_shards": 2}}
    path = served.write({"apiVersion": "gpuflow/v1", "kind": "Task", "metadata": {"name": "split"}, "spec": spec})

    done = served.json("submit", path, "--wait")

    assert [len(one["tasks"]) for one in done["stages"]] == [2]


def test_unknown_ids_are_bad_input(served: Shell) -> None:
    for command in ("status", "logs", "result", "cancel", "retry", "resume", "explain"):
        done = served(command, "no-such-id", code=2)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1


def test_up_serves_restarts_and_stops(shell: Shell) -> None:
    process, out = shell.start("up", "--no-flower", "--workers", "2")
    shell.until(process, out, "ready")
    assert len(shell.json("workers")) == 2
    gateway = next(line.split()[1] for line in out.read_text().splitlines() if line.startswith("gateway"))
    assert httpx.get(f"{gateway}/healthz", timeout=patient(30)).json() == {"status": "ok"}
    path = shell.write(pipeline(stage("one", "a")))
    assert shell.json("submit", path, "--wait")["state"] == "SUCCEEDED"
    victim = shell.json("workers")[0]
    os.kill(victim["pid"], signal.SIGKILL)
    shell.until(process, out, f"{victim['id']} ended (exit code -9)")

    def back() -> bool:
        return any(item["id"] == victim["id"] and item["pid"] != victim["pid"] for item in shell.json("workers"))

    eventually(back, within=60, what="the worker that was killed")
    # A second cluster on the same state folder shares the broker.
    assert "pipeline succeeded" in shell("run", path).stdout
    pids = family(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 0
    promised(running(pids) == [], "processes of the command are left")
    assert shell.json("workers") == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway}/healthz", timeout=patient(30))


def test_a_run_survives_the_end_of_the_run_that_owns_the_broker(shell: Shell) -> None:
    gate = shell.folder / "gate"
    first, out = shell.start("run", shell.write(pipeline(stage("short", until_exists=str(gate))), "a.json"))
    shell.until(first, out, "short: started")
    longer = pipeline(stage("longer", until_exists=str(gate)), stage("end"))
    second, text = shell.start("run", shell.write(longer, "b.json"))
    shell.until(second, text, "longer: started")
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=patient(30)) == 130
    gate.touch()
    assert second.wait(timeout=patient(90)) == 0, text.read_text()
    assert "the embedded server has ended; it starts again" in text.read_text()
