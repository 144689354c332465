"""A task against what its worker allows it: limits, another user, a sandbox. The worker goes on with other work."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit
from tests.hostile.workers.test_own_process import PROBE, command, start_worker
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.users import User, launcher
from tests.support.waiting import eventually, patient

#: Uploads of checkpoints that the race is given.
TRIES = 8


def ended(fleet: TestFleet, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a task that fails, and return its error."""
    task = submit({**spec, "retry": {"max_attempts": 1}}, app=fleet.app)
    eventually(lambda: fleet.state(task.id) in ("FAILED", "DEAD"), within=60, what="the end of the task")
    return task.record().error or {}


def said(fleet: TestFleet, *argv: str, **fields: Any) -> Any:
    """Run a program that writes JSON to `said` in its output folder, and return that."""
    task = submit(command(*argv, **fields), app=fleet.app)
    task.get(timeout=patient(60))
    return json.loads((fleet.results / task.id / "said").read_text())


def script(body: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import json, os, sys\nsaid = {{}}\n{body}\n"
        "open(os.path.join(os.environ['OUTPUT_DIR'], 'said'), 'w').write(json.dumps(said))",
    ]


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "most", "code"),
    [
        ("GPUFLOW_CHILD_MAX_FILE_BYTES", "1MiB", "open('big', 'wb').write(b'x' * 4_000_000)"),
        ("GPUFLOW_CHILD_MAX_MEMORY", "1GiB", "b'x' * 2_000_000_000"),
    ],
)
def test_a_limit_is_named_in_the_error(fleet: TestFleet, setting: str, most: str, code: str) -> None:
    fleet.start_worker("w1", env={setting: most})

    error = ended(fleet, command(sys.executable, "-c", code))

    assert f"{setting} of this worker is " in error["message"]
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1


def test_a_fork_bomb_meets_its_limit(fleet: TestFleet, ana: User, open_folder: Path) -> None:
    start_worker(fleet, ana, ana.owns(open_folder / "ana"), GPUFLOW_CHILD_MAX_PROCESSES="100")
    bomb = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(600)"

    error = ended(fleet, command(sys.executable, "-c", bomb))

    assert "GPUFLOW_CHILD_MAX_PROCESSES of this worker is 100" in error["message"]
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1


# -- another user --------------------------------------------------------------------------------------------------


@pytest.fixture
def as_ben(fleet: TestFleet, ben: User, open_folder: Path) -> WorkerProcess:
    """A worker that runs as root, and its tasks as Ben."""
    env = {"GPUFLOW_CHILD_USER": ben.name, "PYTHONDONTWRITEBYTECODE": "1"}
    worker = WorkerProcess(
        fleet.settings.redis_url or "", open_folder / "w", "w1", "--without-mingle", env=env, launcher=launcher()
    )
    fleet.workers.append(worker)
    return worker.ready()


def test_tasks_run_as_another_user(fleet: TestFleet, as_ben: WorkerProcess, ben: User, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root's")
    body = f"""
import subprocess
said.update(uid=os.getuid(), groups=os.getgroups(), home=os.environ['HOME'])
said['reads'] = os.access({str(secret)!r}, os.R_OK) or os.access('/etc/shadow', os.R_OK)
said['probed'] = json.loads(subprocess.run([sys.executable, {str(PROBE)!r}, 'workers'], capture_output=True).stdout)
os.makedirs('final_model'); open('final_model/weights', 'w').write('w')
"""
    task = submit(command(*script(body)), app=fleet.app)
    result = task.get(timeout=patient(60))

    folder = as_ben.settings.results_dir / task.id
    found = json.loads((folder / "said").read_text())
    assert (found["uid"], found["groups"]) == (ben.uid, [ben.gid])
    assert not found["reads"]
    assert found["probed"]["value"] == {"seen": 3, "had": [[], [], []], "broker": False}
    assert Path(result["final_model_archive"]).stat().st_uid == ben.uid
    assert (folder / "attempt-1").stat().st_mode & 0o077 == 0


def test_a_task_of_another_user_is_cancelled_with_all_it_started(fleet: TestFleet, as_ben: WorkerProcess) -> None:
    task = submit(command("sh", "-c", "sleep 600 & sleep 600"), app=fleet.app)
    eventually(
        lambda: sum("sleep" in one.name() for one in as_ben.children()) == 2,
        within=60,
        what="the processes of the task",
    )

    task.cancel()

    eventually(lambda: fleet.state(task.id) == "CANCELLED", within=60, what="the end of the task")
    assert not [one for one in as_ben.children() if "sleep" in one.name()]


def test_inputs_of_another_user(fleet: TestFleet, as_ben: WorkerProcess, ben: User) -> None:
    """What is unpacked for a task, and what an earlier one has left, is its user's to read."""
    first = submit(command("sh", "-c", "mkdir final_model; echo w > final_model/weights"), app=fleet.app)
    archive = first.get(timeout=patient(60))["final_model_archive"]
    body = "said['names'] = sorted(os.listdir(os.environ['P']))"
    task = submit(command(*script(body), env={"P": str(Path(archive).parent / "final_model")}), app=fleet.app)
    task.get(timeout=patient(60))
    loads = {**fleet.echo(output=1), "checkpoint": {"load": {"path": archive}}}
    assert submit(loads, app=fleet.app).get(timeout=patient(60))["output"] == 1

    assert json.loads((as_ben.settings.results_dir / task.id / "said").read_text()) == {"names": ["weights"]}
    unpacked = [path for path in (as_ben.settings.cache_dir / "checkpoints").rglob("*") if path.name == "weights"]
    assert [path.stat().st_uid for path in unpacked] == [ben.uid]


def test_inputs_are_unpacked_for_another_user_in_a_sandbox(fleet: TestFleet, ben: User, open_folder: Path) -> None:
    need_bubblewrap()
    env = {"GPUFLOW_CHILD_USER": ben.name, "GPUFLOW_ISOLATE": "bubblewrap", "PYTHONDONTWRITEBYTECODE": "1"}
    worker = WorkerProcess(
        fleet.settings.redis_url or "", open_folder / "w", "w1", "--without-mingle", env=env, launcher=launcher()
    )
    fleet.workers.append(worker)
    worker.ready()
    first = submit(command("sh", "-c", "mkdir final_model; echo w > final_model/weights"), app=fleet.app)
    archive = first.get(timeout=patient(60))["final_model_archive"]

    loads = {**fleet.echo(output=1), "checkpoint": {"load": {"path": archive}}, "retry": {"max_attempts": 1}}

    assert submit(loads, app=fleet.app).get(timeout=patient(60))["output"] == 1


def test_links_lead_a_worker_of_root_nowhere(fleet: TestFleet, as_ben: WorkerProcess, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("root's")
    plant = f"import os; [os.symlink({str(victim)!r}, n) for n in ('.manifest.json.new', '.responses.json.new')]"

    submit(command(sys.executable, "-c", plant), app=fleet.app).get(timeout=patient(60))

    assert victim.read_text() == "root's"


def test_a_checkpoint_that_changes_into_links_while_root_uploads_it(
    fleet: TestFleet, ben: User, open_folder: Path
) -> None:
    """The task exchanges folders of its checkpoints for links to files of root, over and over."""
    victim, store, stop = open_folder / "victim", open_folder / "store", open_folder / "stop"
    (victim / "sub").mkdir(parents=True)
    for name in ("complete.json", "sub/a.bin"):
        (victim / name).write_text("root's")
        (victim / name).chmod(0o600)
    env = {"GPUFLOW_CHILD_USER": ben.name, "PYTHONDONTWRITEBYTECODE": "1", "GPUFLOW_STORE_URL": store.as_uri()}
    worker = WorkerProcess(
        fleet.settings.redis_url or "", open_folder / "w", "w1", "--without-mingle", env=env, launcher=launcher()
    )
    fleet.workers.append(worker)
    worker.ready()
    body = f"""
import itertools, shutil
top = os.path.join(os.environ['CHECKPOINT_DIR'])
for step in itertools.count(1):
    one = os.path.join(top, f'checkpoint-{{step}}')
    os.makedirs(one + '/sub')
    open(one + '/sub/a.bin', 'w').write('mine')
    open(one + '/complete.json', 'w').write('{{}}')
    print(json.dumps({{'event': 'checkpoint', 'path': one, 'step': step}}), flush=True)
    for _ in range(300):
        for path, leads in ((one + '/sub', {str(victim / "sub")!r}), (one, {str(victim)!r})):
            os.rename(path, path + '-own'); os.symlink(leads, path)
            os.remove(path); os.rename(path + '-own', path)
    if os.path.exists({str(stop)!r}):
        break
    shutil.rmtree(one)
"""
    task = submit(command(*script(body)), app=fleet.app)
    eventually(lambda: worker.log().count("event=checkpoint_") >= TRIES, within=60, what="uploads that were tried")
    stop.touch()
    task.get(timeout=patient(60))

    def stored() -> list[str] | None:
        """Return what is in the store; None while an older checkpoint goes away under the look."""
        try:
            return [path.read_text() for path in store.rglob("*") if path.is_file()]
        except FileNotFoundError:
            return None

    found = eventually(stored, what="what is stored")
    assert "{}" in found or len(found) > 1, "its results are stored"
    assert "root's" not in found


def refused(fleet: TestFleet, folder: Path, *options: str, before: list[str] | None = None, **env: str) -> str:
    """Start a worker that does not start, and return what it says."""
    worker = WorkerProcess(fleet.settings.redis_url or "", folder, "w9", *options, env=env, launcher=before or [])
    fleet.workers.append(worker)
    assert worker.process.wait(timeout=patient(60)) == 2, worker.log()[-2000:]
    return worker.log()


def test_a_user_that_cannot_be_taken(fleet: TestFleet, ana: User, open_folder: Path) -> None:
    text = refused(fleet, open_folder / "a", GPUFLOW_CHILD_USER="nobody-of-that-name")
    assert "GPUFLOW_CHILD_USER is 'nobody-of-that-name', and this machine has no such user" in text
    text = refused(fleet, open_folder / "b", GPUFLOW_CHILD_USER="root")
    assert "which is root" in text
    text = refused(fleet, ana.owns(open_folder / "c"), before=launcher(ana), GPUFLOW_CHILD_USER="root")
    assert "does not run as root" in text


def test_folders_that_the_user_cannot_reach(fleet: TestFleet, ben: User, open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)

    text = refused(fleet, closed / "w", before=launcher(), GPUFLOW_CHILD_USER=ben.name)

    assert f"who cannot reach '{closed}/w/results'" in text


# -- a sandbox -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["root", "user", "child-user"])
def sandboxed(
    request: pytest.FixtureRequest, fleet: TestFleet, ana: User, ben: User, open_folder: Path
) -> WorkerProcess:
    """A worker whose tasks are isolated: of root, of a user, and of root with tasks of another user."""
    need_bubblewrap()
    env = {"GPUFLOW_ISOLATE_FOLDERS": str(Path(__file__).parent), "GPUFLOW_SECRETS_DIR": ""}
    folder = ana.owns(open_folder / "w") if request.param == "user" else open_folder / "w"
    if request.param == "child-user":
        env["GPUFLOW_CHILD_USER"] = ben.name
    before = launcher(ana if request.param == "user" else None)
    url = fleet.settings.redis_url or ""
    worker = WorkerProcess(url, folder, "w1", "--without-mingle", "--isolate", "bubblewrap", env=env, launcher=before)
    fleet.workers.append(worker)
    return worker.ready()


def test_an_isolated_task_sees_its_own_folders(fleet: TestFleet, sandboxed: WorkerProcess) -> None:
    other = submit(command("sh", "-c", "echo other > made"), app=fleet.app)
    other.get(timeout=patient(60))
    folder = sandboxed.settings.results_dir
    body = f"""
said['processes'] = len([one for one in os.listdir('/proc') if one.isdigit()])
said['results'] = os.listdir({str(folder)!r})
said['state'] = os.path.exists({str(sandboxed.settings.state_dir)!r})
said['tmp'] = sorted(os.listdir('/tmp'))
said['home'] = os.path.realpath(os.environ['HOME'])
said['etc'] = os.path.exists('/etc/shadow')
said['root'] = sorted(os.listdir('/'))
def tries(path):
    try:
        open(path, 'w').close()
        return True
    except OSError:
        return False
said['wrote'] = [p for p in ('/usr/x', '/etc/x', '/x', sys.prefix + '/x') if tries(p)]
tries({str(folder / "x")!r})
said['cache'] = tries(os.path.join({str(sandboxed.settings.cache_dir)!r}, 'mark'))
"""
    task = submit(command(*script(body)), app=fleet.app)
    task.get(timeout=patient(60))

    found = json.loads((folder / task.id / "said").read_text())
    assert found["results"] == [task.id]
    assert found["processes"] < 6
    assert not found["state"]
    assert found["home"] == "/tmp/home"
    assert not found["etc"]
    assert "home" not in found["root"]
    assert found["wrote"] == []
    assert not (folder / "x").exists()
    assert found["cache"]


def test_an_isolated_task_is_cancelled_in_good_order(fleet: TestFleet, sandboxed: WorkerProcess) -> None:
    """SIGTERM comes to the program itself: bubblewrap, which would die of it, does not stand in the way."""
    line = "trap 'echo bye > left; exit 3' TERM; echo begun > begun; sleep 600 & wait"
    task = submit(command("sh", "-c", line), app=fleet.app)
    attempt = sandboxed.settings.results_dir / task.id / "attempt-1"
    eventually((attempt / "begun").exists, within=60, what="the begin of the task")

    task.cancel()

    eventually(lambda: fleet.state(task.id) == "CANCELLED", within=60, what="the end of the task")
    assert (attempt / "left").read_text() == "bye\n"
    assert not [one for one in sandboxed.children() if "sleep" in one.name()]


def test_how_an_isolated_child_ended_is_known(fleet: TestFleet, sandboxed: WorkerProcess) -> None:
    """A program that kills its executor: that was ended by a signal, and its task is tried again."""
    error = ended(fleet, command("sh", "-c", "kill -9 $PPID; sleep 60"))

    assert "signal SIGKILL" in json.dumps(error), error
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1


def test_without_a_network(fleet: TestFleet) -> None:
    need_bubblewrap()
    fleet.start_worker("w1", env={"GPUFLOW_ISOLATE": "bubblewrap", "GPUFLOW_ISOLATE_NETWORK": "0"})
    body = "import socket; said['names'] = [name for _, name in socket.if_nameindex()]"
    assert said(fleet, *script(body)) == {"names": ["lo"]}


def test_without_bubblewrap(fleet: TestFleet, open_folder: Path) -> None:
    """A worker that cannot isolate does not start, and says what is missing."""
    bare = open_folder / "bin"
    bare.mkdir()
    for name in ("sh", "uname"):
        if found := shutil.which(name):
            (bare / name).symlink_to(found)

    text = refused(fleet, open_folder / "w", "--isolate", "bubblewrap", PATH=str(bare))
    assert "bwrap is not installed; run `apt-get install bubblewrap`" in text

    (bare / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (bare / "bwrap").chmod(0o755)
    text = refused(fleet, open_folder / "w", "--isolate", "bubblewrap", PATH=str(bare))
    assert "makes no sandbox on this machine (bwrap: No permissions to create new namespace)" in text
    assert "kernel.unprivileged_userns_clone=1" in text
