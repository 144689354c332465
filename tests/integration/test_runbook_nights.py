"""The nights of docs/runbook.md: each fault is made, the commands are typed as they stand there, and what they print is
compared with what the page quotes; then what the page says to do ends the trouble."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpuflow import submission
from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.ledger import ledger, records
from gpuflow.worker import supervisor
from tests.fixtures.fleets import fleet
from tests.fixtures.simulated_nvml import SimGpu
from tests.support.boxes import Box
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.runbook import night, pattern, typed, unsaid
from tests.support.waiting import eventually, patient

__all__ = ["fleet"]

SUPPORT = Path(__file__).parents[1] / "support"
#: Heartbeats that let a night pass quickly.
QUICK = {"HEARTBEAT_INTERVAL_SEC": "1", "HEARTBEAT_TIMEOUT_SEC": "30", "GPUFLOW_LEASE_SEC": "4"}


class Shell:
    """The shell of whoever was woken, at one fleet."""

    def __init__(self, fleet: TestFleet) -> None:
        self.fleet = fleet
        self.env = {
            "REDIS_URL": str(fleet.settings.redis_url),
            "HOME": str(fleet.folder),
            "RESULTS_DIR": str(fleet.results),
            "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir),
            "GPUFLOW_SUBMIT_TIMEOUT_SEC": "1",
        }

    def typed(self, number: int, lines: tuple[int, ...] = (), **words: str) -> str:
        return typed(number, self.env, lines=lines, **words)

    def says(self, number: int, quotes: tuple[int, ...] = (), lines: tuple[int, ...] = (), **words: str) -> None:
        """Type a night's commands until they print what the page quotes."""
        told: list[str] = []

        def said() -> bool:
            output = self.typed(number, lines, **words)
            told[:] = [f"not printed: {unsaid(number, output, quotes=quotes)}", output]
            return not unsaid(number, output, quotes=quotes)

        try:
            eventually(said, within=30, what=f"what night {number} quotes")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *told])) from None

    def over(self, number: int, quote: int, lines: tuple[int, ...] = (), **words: str) -> None:
        """Type them until that line is gone."""
        eventually(lambda: unsaid(number, self.typed(number, lines, **words), quotes=(quote,)), what="its end")

    def hold(self, **spec: object) -> Task:
        """Submit a task that runs for very long."""
        return submit({**self.fleet.echo(sleep_seconds=600), **spec}, app=self.fleet.app)


@pytest.fixture
def shell(fleet: TestFleet) -> Iterator[Shell]:
    """A shell at a fleet of its own; `t.yaml` is a template in its folder."""
    (fleet.folder / "t.yaml").write_text("taskType: echo\necho: {output: 1}\n")
    before = Path.cwd()
    os.chdir(fleet.folder)
    try:
        yield Shell(fleet)
    finally:
        os.chdir(before)


def running(*tasks: Task) -> None:
    eventually(lambda: {task.state for task in tasks} == {"RUNNING"}, what="running tasks")


def ends(task: Task) -> None:
    eventually(lambda: task.state == "SUCCEEDED", what="the end of the task")


# -- the broker --------------------------------------------------------------------------------------------------------


def test_1_the_broker_is_away(shell: Shell) -> None:
    worker = shell.fleet.start_worker("w1", env=QUICK)
    shell.fleet.broker.kill()
    shell.says(1)
    eventually(lambda: "event=broker_lost cause=" in worker.log(), what="the cause in the log")
    shell.fleet.broker.restart()
    eventually(lambda: "event=broker_is_back away_seconds=" in worker.log(), what="the end in the log")
    assert "WORKERS" in shell.typed(6, lines=(0,)) or "nothing waits" in shell.typed(6, lines=(0,))


def test_2_the_password_was_changed(shell: Shell) -> None:
    worker = shell.fleet.start_worker("w1", env=QUICK)
    client, old = shell.fleet.broker.client, str(shell.fleet.settings.redis_url).split(":")[2].split("@")[0]
    client.acl_setuser("default", enabled=True, passwords=["+another", f"-{old}"])
    client.client_kill_filter(_type="normal", skipme=True)
    shell.says(2)
    late = shell.fleet.spawn_worker("late", env=QUICK)
    eventually(lambda: "event=broker_denies" in worker.log(), what="the cause in the log")
    assert late.process.wait(timeout=patient(60)) == 2 and "event=token_refused" in late.log()
    client.acl_setuser("default", enabled=True, passwords=[f"+{old}"])  # beside the other one
    eventually(lambda: "event=broker_is_back" in worker.log(), what="the end in the log")


def test_3_the_memory_is_used_up(shell: Shell) -> None:
    worker = shell.fleet.start_worker("w1", env=QUICK)
    shell.fleet.broker.client.config_set("maxmemory", 1 << 20)
    shell.says(3)
    eventually(lambda: "event=broker_refuses" in worker.log(), what="the cause in the log")
    shell.fleet.broker.client.config_set("maxmemory", 4 << 30)
    eventually(lambda: "event=can_be_taken_again" in worker.log(), what="the end in the log")
    shell.over(3, 0, lines=(0,))
    ends(submit(shell.fleet.echo(output=1), app=shell.fleet.app))


def test_5_the_broker_is_a_replica(shell: Shell) -> None:
    worker = shell.fleet.start_worker("w1", env=QUICK)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        shell.fleet.broker.client.execute_command("REPLICAOF", "127.0.0.1", nobody.getsockname()[1])
        shell.says(5)
        eventually(lambda: "event=broker_refuses" in worker.log(), what="the cause in the log")
    shell.fleet.broker.client.execute_command("REPLICAOF", "NO", "ONE")
    eventually(lambda: "event=broker_is_back" in worker.log(), what="the end in the log")
    shell.over(5, 0, lines=(0,))


# -- tasks wait --------------------------------------------------------------------------------------------------------


def test_6_nothing_runs(shell: Shell) -> None:
    task = submit(shell.fleet.echo(output=1), app=shell.fleet.app)
    shell.says(6, quotes=(0, 1), ID=task.id)
    worker = shell.fleet.start_worker("w1", env=QUICK)
    ends(task)
    worker.stop()
    task = submit(shell.fleet.echo(output=2), app=shell.fleet.app)
    shell.says(6, quotes=(0, 2), ID=task.id)
    shell.fleet.start_worker("w9", env={**QUICK, "GPUFLOW_DISK_FLOOR_BYTES": str(1 << 60)})
    assert "or start w1, which has stopped" in night(6).text
    assert "or start w1, which has stopped" in shell.typed(6, lines=(1,), ID=task.id)
    shell.fleet.start_worker("w1", env=QUICK)
    ends(task)


def test_7_8_and_9_a_task_that_no_worker_takes(shell: Shell) -> None:
    closed = {**QUICK, "GPUFLOW_ALLOW_CODE": "none"}
    shell.fleet.start_worker("w1", env=closed)
    w6 = shell.fleet.start_worker("w6", "--label", "k=6", env=closed)
    shell.fleet.start_worker("w7", "--label", "k=7", "-Q", "gpu-a100", env=closed)
    w6.stop()
    memory = {**shell.fleet.echo(output=1), "resources": {"hardware": {"memory": "9000GiB"}}}
    (asks,) = shell.typed(7, ID=submit(memory, app=shell.fleet.app).id).splitlines()[:1]
    assert pattern(night(7).quotes[0].replace("w1", "NAME")).search(asks), asks
    site = {**shell.fleet.echo(output=1), "resources": {"labels": {"site": "b"}}}
    asks = shell.typed(7, ID=submit(site, app=shell.fleet.app).id)
    assert "the task asks for label site=b, the worker has no such label" in night(7).text
    assert "the task asks for label site=b, the worker has no such label" in asks
    seven = {**shell.fleet.echo(output=1), "resources": {"labels": {"k": "7"}}}
    task = submit(seven, app=shell.fleet.app)
    shell.says(8, ID=task.id)
    shell.fleet.start_worker("w8", "--label", "k=7", env=closed)
    ends(task)
    shell.fleet.start_worker("w6", "--label", "k=6", env=closed)
    command = {
        "taskType": "command",
        "command": {"command": "true"},
        "resources": {"labels": {"k": "6"}, "hardware": {"cpu": 1}},
    }
    shell.says(9, ID=submit(command, app=shell.fleet.app).id)


def test_10_and_11_disabled_and_busy(shell: Shell) -> None:
    worker = shell.fleet.start_worker("w1", "--max-jobs", "1", env=QUICK)
    assert "nothing new" in typed_line(shell, "gpuflow workers disable w1 --reason fan")
    shell.says(10, lines=(0, 1))
    shell.typed(10)
    running(shell.hold())
    assert "IDLE, enabled by hand" in night(10).text and ", enabled by hand" in shell.typed(10, lines=(0,))
    shell.says(11, ID=shell.hold().id)
    assert worker.process.poll() is None


def typed_line(shell: Shell, line: str) -> str:
    """Type a line that stands in the text of a night."""
    import shlex

    from click.testing import CliRunner

    from gpuflow.cli import cli

    return CliRunner().invoke(cli, shlex.split(line)[1:], env=shell.env).output


def test_12_23_and_24_a_disk_a_memory_and_a_clock(shell: Shell) -> None:
    skewed = os.pathsep.join([str(SUPPORT / "skewed"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    started = [
        shell.fleet.spawn_worker("w4", env={**QUICK, "GPUFLOW_DISK_FLOOR_BYTES": str(1 << 60)}),
        shell.fleet.spawn_worker("w5", "--include", "broken_machine", env={**QUICK, "BROKEN_MACHINE": "memory"}),
        shell.fleet.spawn_worker("w8", env={**QUICK, "CLOCK_AHEAD_SECONDS": "90", "PYTHONPATH": skewed}),
    ]
    for one in started:
        one.ready()
    shell.says(12)
    shell.says(23)
    shell.says(24)
    for one, number in zip(started, (12, 23, 24), strict=True):
        one.stop()
        shell.fleet.start_worker(one.name, env=QUICK)
        shell.over(number, 0, lines=(0,))


def test_13_an_older_worker(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.fleet.start_worker("w1", env=QUICK)
    newer = records.RECORD_SCHEMA + 1
    for module in (ledger, records, submission, supervisor):  # as where the newer version is installed
        monkeypatch.setattr(module, "RECORD_SCHEMA", newer)
    monkeypatch.setattr(records, "COMMON_SCHEMA", newer)
    monkeypatch.setattr("gpuflow.fleet.standing.RECORD_SCHEMA", newer)
    task = submit(shell.fleet.echo(output=1), app=shell.fleet.app)
    shell.says(13, ID=task.id)


# -- tasks fail --------------------------------------------------------------------------------------------------------


def test_14_15_and_27_cancel_and_who_did_it(shell: Shell) -> None:
    spec = {"apiVersion": "gpuflow/v1", "kind": "Task", "metadata": {"name": "sweep", "owner": "ana"}}
    tasks = [submit({**spec, "spec": shell.fleet.echo(sleep_seconds=600)}, app=shell.fleet.app) for _ in range(3)]
    shell.says(14, quotes=(0,), lines=(0, 1))
    assert not unsaid(14, shell.typed(14, lines=(2,)), quotes=(1,))
    assert {task.state for task in tasks} == {"CANCELLED"}
    assert "3 of 3 queued again" in typed_line(shell, "gpuflow retry --owner ana --state cancelled")
    shell.typed(14, lines=(2,))

    shell.fleet.start_worker("w1", env=QUICK)
    task = shell.hold()
    running(task)
    assert not unsaid(15, shell.typed(15, lines=(0,), ID=task.id), quotes=(0,))
    shell.says(15, quotes=(1,), lines=(1,), ID=task.id)
    shell.says(27, ID=task.id)


def test_16_18_and_19_the_dead_a_pipeline_and_what_nobody_reads(shell: Shell, tmp_path: Path) -> None:
    shell.fleet.start_worker("w1", env=QUICK)
    one_cpu = {"hardware": {"cpu": 1}}
    dies = {
        "taskType": "command",
        "command": {"command": "kill -9 $$"},
        "resources": one_cpu,
        "retry": {"max_attempts": 2, "backoff_seconds": 0},
    }
    task = submit(dies, app=shell.fleet.app)
    eventually(lambda: task.state == "DEAD", what="a dead letter")
    shell.says(16, quotes=(0, 1), lines=(0, 1), ID=task.id)
    assert not unsaid(16, shell.typed(16, lines=(2,), ID=task.id), quotes=(2,))
    eventually(lambda: task.state == "DEAD", what="the dead letter again")

    fixed = tmp_path / "fixed"
    stages = [
        {
            "name": "a",
            "spec": {"taskType": "command", "command": {"command": f"test -f {fixed}"}, "resources": one_cpu},
        },
        {"name": "b", "spec": {"taskType": "echo", "echo": {"output": "${a.result.exit_code}"}}},
    ]
    run = submit_pipeline(
        {"apiVersion": "gpuflow/v1", "metadata": {"name": "nightly"}, "spec": {"stages": stages}}, app=shell.fleet.app
    )
    shell.says(18, quotes=(0,), lines=(0, 1), PIPELINE=run.id)
    fixed.touch()
    assert not unsaid(18, shell.typed(18, lines=(2,), PIPELINE=run.id), quotes=(1,))
    eventually(lambda: run.state == "SUCCEEDED", what="the end of the pipeline")

    shell.fleet.broker.client.lpush("tasks", "garbage")
    shell.says(19)
    eventually(lambda: "messages_put_aside" in "".join(one.log() for one in shell.fleet.workers), what="its line")
    assert "1 forgotten" in typed_line(shell, "gpuflow dead messages --purge")
    assert "no such messages" in shell.typed(19, lines=(0,))


# -- workers and machines ----------------------------------------------------------------------------------------------


def test_20_and_21_a_worker_that_is_silent_and_one_that_has_to_go(shell: Shell) -> None:
    for name in ("w1", "w3", "w5"):
        shell.fleet.spawn_worker(name, "--label", f"box={name}", env=QUICK)
    w1, w3, _ = (worker.ready() for worker in shell.fleet.workers)
    task, other = (shell.hold(resources={"labels": {"box": name}}) for name in ("w3", "w5"))
    running(task, other)
    w3.send(signal.SIGSTOP)
    shell.says(20, ID=task.id)
    lost = re.compile(r"event=worker_lost worker=w3 queued_again=\['" + task.id)
    eventually(lambda: any(lost.search(one.log()) for one in shell.fleet.workers), what="who was lost, in a log")
    w3.send(signal.SIGCONT)
    running(task)
    shell.over(20, 0, lines=(0,))
    assert task.record().attempt == 1 and "event=lease_taken_back" in w3.log()

    output = typed_line(shell, night(21).commands[0].replace("90s", "1s"))
    assert not unsaid(21, output) and "OFFLINE" in shell.typed(21, lines=(1,))
    record = other.record()
    assert (str(record.state), record.failures) == ("QUEUED", 0)
    assert w1.process.poll() is None


def test_22_no_driver_and_a_lost_gpu(shell: Shell) -> None:
    with Box(shell.fleet, "b", "2xA100-80GB") as box:
        box.start("w2", **QUICK)
        shell.fleet.start_worker("w4", "--include", "broken_machine", env={**QUICK, "BROKEN_MACHINE": "driver"})
        box.become([SimGpu(), SimGpu(lost=True)])
        shell.says(22)
        assert "event=gpus_lost" in box.workers[0].log()
        box.become("2xA100-80GB")
        shell.over(22, 2)
        eventually(lambda: "event=gpus_are_back" in box.workers[0].log(), what="the end in the log")


def test_25_no_beat(shell: Shell) -> None:
    shell.says(25)


def test_26_the_gateway_without_its_broker(shell: Shell) -> None:
    health, metrics = ("/" + line.rsplit("/", 1)[1] for line in night(26).commands)
    with Gateway(shell.fleet.folder, env={"REDIS_URL": shell.fleet.broker.url}) as gateway:
        told = [httpx.get(gateway.url + health).text]
        assert httpx.get(gateway.url + metrics).status_code == 401
        shell.fleet.broker.kill()

        def away() -> bool:
            answer = httpx.get(gateway.url + metrics, headers=gateway.headers)
            told.append(answer.text)
            return answer.status_code == 503  # the last answer is given for a moment

        eventually(away, within=15, what="an answer without the broker")
        assert not unsaid(26, "\n".join(told))
        assert "event=broker_lost cause=" in gateway.log
        shell.fleet.broker.restart()
        eventually(lambda: not away(), within=15, what="the metrics again")
        assert "event=broker_is_back" in gateway.log
