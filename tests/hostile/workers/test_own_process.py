"""A task tries to get at its worker, and a user of the machine at another's: memory, environment, files, locks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.settings import Settings
from tests.gate import leftovers
from tests.support.fleet import TestFleet, WorkerProcess, running
from tests.support.users import User, launcher
from tests.support.waiting import eventually, patient

PROBE = Path(__file__).with_name("probe.py")


def command(*argv: str, **fields: Any) -> dict[str, Any]:
    return {"taskType": "command", "command": {"command": list(argv)}, **fields}


def as_user(user: User, *argv: str, said: str = "") -> Any:
    done = subprocess.run([*launcher(user), *argv], input=said, capture_output=True, text=True, check=True, cwd="/")
    return json.loads(done.stdout)


def start_worker(fleet: TestFleet, user: User, folder: Path, **env: str) -> WorkerProcess:
    """Start a worker as another user, in a folder of its own."""
    worker = WorkerProcess(
        fleet.settings.redis_url or "", folder, "w1", "--without-mingle", env=env, launcher=launcher(user)
    )
    fleet.workers.append(worker)
    return worker.ready()


def test_a_task_reads_nothing_of_its_worker(fleet: TestFleet, ana: User, open_folder: Path) -> None:
    worker = start_worker(fleet, ana, ana.owns(open_folder / "ana"))

    probed = submit(command(sys.executable, str(PROBE), "workers"), app=fleet.app).get(timeout=patient(60))

    said = json.loads(probed["stdout"].strip().splitlines()[-1]) if "stdout" in probed else probed
    value = said.get("value", said)
    assert value["seen"] == 3, "the worker, the process that forks shims, and the shim"
    assert value["had"] == [[], [], []]
    assert not value["broker"], "the address of the broker stands in an environment that can be read"
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1
    assert running([worker.pid])


def test_two_users_of_one_machine(ana: User, ben: User, open_folder: Path) -> None:
    """All that `gpuflow up` of one user starts and writes, against another user."""
    home = ana.owns(open_folder / "ana")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "REDIS_URL"},
        **leftovers.passed_on(),
        "HOME": str(home),
        "RESULTS_DIR": str(home / "results"),
        "GPUFLOW_STATE_DIR": str(home / "state"),
        "GPUFLOW_CACHE_DIR": str(home / "cache"),
        "GPUFLOW_LOCK_DIR": str(home / "locks"),
        "GPUFLOW_GRACE_SEC": "1",
    }
    up = [sys.executable, "-c", "from gpuflow.cli import main; main()", "up", "--no-flower", "--no-gateway"]
    output = open_folder / "up.log"
    with output.open("wb") as log:
        process = subprocess.Popen([*launcher(ana), *up], env=environment, cwd=home, stdout=log, stderr=log)
    try:
        eventually(lambda: "ready" in output.read_text(), within=60, what="gpuflow up")
        url = EmbeddedServer.running(home / "state")
        assert url is not None
        app = GPUFlow("probe", settings=Settings.load(env={**environment, "REDIS_URL": url}, cwd=home))
        try:
            task = submit({"taskType": "echo", "echo": {"output": 7}}, app=app)
            assert task.get(timeout=patient(60))["output"] == 7
            _nothing_is_had(home, process.pid, ben)
            assert submit({"taskType": "echo", "echo": {"output": 8}}, app=app).get(timeout=patient(60))["output"] == 8
        finally:
            app.close()
            app.redis.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=patient(60))


def _nothing_is_had(home: Path, pid: int, other: User) -> None:
    paths = [path for path in sorted(home.rglob("*"), reverse=True) if not path.is_symlink()]
    names = {path.name for path in paths}
    assert {"responses.json", "executor.log", "manifest.json"} <= names
    assert any("valkey" in name or name.endswith((".conf", ".aof")) for name in names), names

    assert as_user(other, sys.executable, str(PROBE), "paths", said=json.dumps([str(path) for path in paths])) == {}
    family = [pid, *_below(pid)]
    assert len(family) > 3
    said = as_user(other, sys.executable, str(PROBE), "process", *map(str, family))
    assert said == {"had": [[] for _ in family], "ended": [False for _ in family]}


def _below(pid: int) -> list[int]:
    import psutil

    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


PLANT = """
import os, sys
victim = sys.argv[1]
out = os.environ["OUTPUT_DIR"]
for name in (".manifest.json.new", ".responses.json.new", ".final_model.tar.gz.new", "manifest.json"):
    os.symlink(victim, os.path.join(out, name))
os.makedirs(os.path.join(out, "final_model"))
open(os.path.join(out, "final_model", "weights"), "w").write("w")
# A text with a secret in it, which is written anew without it.
open(os.path.join(out, "said.txt"), "w").write("evil " + os.environ["PLANTED_TOKEN"])
os.symlink(victim, os.path.join(out, ".said.txt.new"))
"""


def test_links_in_an_attempt_lead_the_worker_nowhere(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker(env={"GPUFLOW_SECRET_PLANTED_TOKEN": "planted-0123456789"})
    victim = tmp_path / "victim"
    victim.write_text("mine")

    task = submit(command(sys.executable, "-c", PLANT, str(victim), secrets=["PLANTED_TOKEN"]), app=fleet.app)
    task.get(timeout=patient(60))

    assert victim.read_text() == "mine"
    assert (fleet.results / task.id / "attempt-1" / "said.txt").read_text() == "evil ***"


def test_a_link_is_no_result(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "id").write_text("secret")
    plant = f"import os; os.symlink({str(keys)!r}, os.path.join(os.environ['OUTPUT_DIR'], 'final_model'))"

    task = submit(command(sys.executable, "-c", plant), app=fleet.app)

    eventually(lambda: fleet.state(task.id) == "FAILED", within=60, what="the end of the task")
    assert "'final_model', which is a link" in (task.record().error or {})["message"]


def test_files_are_the_workers_own(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env={"GPUFLOW_UMASK": "077"})
    task = submit(command("sh", "-c", "echo 1 > made; mkdir inside"), app=fleet.app)
    task.get(timeout=patient(60))

    folder = fleet.results / task.id
    made = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    assert any(path.name == "made" for path in made)
    assert [str(path) for path in made if path.stat().st_mode & 0o077] == []


def test_a_group_reads_results_when_the_operator_says_so(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env={"GPUFLOW_UMASK": "027"})
    task = submit(command("sh", "-c", "echo 1 > made"), app=fleet.app)
    task.get(timeout=patient(60))

    made = [path for path in (fleet.results / task.id).rglob("*") if not path.is_symlink()]
    assert [str(path) for path in made if path.stat().st_mode & 0o007 or not path.stat().st_mode & 0o040] == []
