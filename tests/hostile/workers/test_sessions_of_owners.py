"""Warm sessions that answer tasks of several owners: what the one has left, the session of the other does not see."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit
from gpuflow.worker.sessions.view import FOLDER
from tests.support.bubblewrap import need_bubblewrap
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.users import User, launcher
from tests.support.waiting import eventually, patient

SUPPORT = Path(build.__code__.co_filename).parent
WRITES = """
import os
os.makedirs(request['output_dir'], exist_ok=True)
open(request['output_dir'] + '/kept', 'w').write('private')
"""
LOOKS = """
import os
said = {'all': [], 'read': None}
results = os.path.dirname(os.path.dirname(request['output_dir']))
for top, _, names in os.walk(results):
    said['all'] += [os.path.relpath(os.path.join(top, name), results) for name in names]
try:
    said['read'] = open(request['spec']['data']['items'][1]).read()
except OSError as error:
    said['read'] = type(error).__name__
"""


def ask(body: str, *named: str, **fields: Any) -> dict[str, Any]:
    return {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": "/models/one"}},
        "data": {"type": "list", "items": [f"do {body}", *named]},
        "retry": {"max_attempts": 1},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        **fields,
    }


def of(fleet: TestFleet, owner: str, spec: dict[str, Any]) -> Task:
    return submit(spec, owner=owner, app=fleet.app)


def answer(task: Task) -> tuple[int, Any]:
    """Return the process that has answered, and what it said."""
    result = task.get(timeout=patient(60))
    return result["pid"], json.loads(result["items"][0]["output"])


def said(task: Task) -> Any:
    return answer(task)[1]


def worker_of(fleet: TestFleet, folder: Path, user: User | None = None, **env: str) -> WorkerProcess:
    build(folder / "envs", SCRIPTED)
    env = {"GPUFLOW_ENV_DIR": str(folder / "envs"), "HEARTBEAT_INTERVAL_SEC": "1", **env}
    url = fleet.settings.redis_url or ""
    home = folder / "w" if user is None else user.owns(folder / "w")
    if user is not None:  # environments are used by who owns them
        for path in (folder / "envs", *(folder / "envs").rglob("*")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)
    worker = WorkerProcess(url, home, "w1", "--without-mingle", env=env, launcher=launcher(user))
    fleet.workers.append(worker)
    return worker.ready()


@pytest.fixture(params=["root", "child-user", "ordinary-user"])
def isolated(
    request: pytest.FixtureRequest, fleet: TestFleet, ana: User, ben: User, open_folder: Path
) -> WorkerProcess:
    need_bubblewrap()
    shown = {str(SUPPORT), sys.prefix, sys.base_prefix}
    env = {"GPUFLOW_ISOLATE": "bubblewrap", "GPUFLOW_ISOLATE_FOLDERS": ",".join(sorted(shown))}
    env["GPUFLOW_READ_ROOTS"] = "/models"
    if request.param == "child-user":
        env["GPUFLOW_CHILD_USER"] = ben.name
    return worker_of(fleet, open_folder, ana if request.param == "ordinary-user" else None, **env)


def test_an_isolated_session_sees_results_of_its_owner_alone(fleet: TestFleet, isolated: WorkerProcess) -> None:
    results = isolated.settings.results_dir
    first = of(fleet, "ana", ask(WRITES))
    said(first)
    kept = results / first.id / "attempt-1" / "kept"
    assert kept.read_text() == "private", "what a session writes comes to the real folder"

    own = said(of(fleet, "ana", ask(LOOKS, str(kept))))
    assert own["read"] == "private"
    assert {name.partition("/")[0] for name in own["all"]} == {first.id}
    forges = "open(request['spec']['data']['items'][1], 'w').write('forged')"
    said(of(fleet, "ana", ask(forges, str(kept))))
    assert kept.read_text() == "private", "what a session sees of earlier results is a copy"
    assert isolated.log().count("event=session_opened") == 1

    assert said(of(fleet, "eve", ask(LOOKS, str(kept)))) == {"all": [], "read": "FileNotFoundError"}

    assert isolated.log().count("event=session_opened") == 2
    isolated.stop()
    assert list((results / FOLDER / "w1").iterdir()) == []


REACHES = """
import os, signal
said = {'seen': [], 'own': os.getuid(), 'killed': [], 'written': []}
for pid in os.listdir('/proc'):
    if pid.isdigit():
        said['seen'].append(open(f'/proc/{pid}/cmdline').read().replace('\\0', ' '))
for pid in request['spec']['data']['items'][1].split(','):
    try:
        os.kill(int(pid), 0)
        said['killed'].append(pid)
    except OSError:
        pass
for place in request['spec']['data']['items'][2:]:
    try:
        said['written'].append(os.listdir(place))
    except OSError:
        pass
"""


def test_an_isolated_session_reaches_neither_processes_nor_folders_of_its_worker(
    fleet: TestFleet, isolated: WorkerProcess
) -> None:
    """A session has the uid of an ordinary worker: the sandbox alone keeps it from the worker's processes and files."""
    pids = [isolated.process.pid, *(child.pid for child in isolated.children())]
    settings = isolated.settings
    views = settings.results_dir / FOLDER / "w1"
    places = [settings.state_dir, settings.results_dir.parent, views]

    done = said(of(fleet, "ana", ask(REACHES, ",".join(map(str, pids)), *map(str, places))))

    assert [line for line in done["seen"] if "celery" in line] == []
    assert done["killed"] == [], "pids of the worker are none in the sandbox"
    assert views.is_dir(), "it is there, and is not seen"
    names = {name for listed in done["written"] for name in listed}
    assert not names & {"sessions", "containers", "aside", "seen"}
    assert answer(of(fleet, "ana", ask("said = 1")))[1] == 1


def test_links_of_a_session_lead_the_worker_nowhere(fleet: TestFleet, isolated: WorkerProcess) -> None:
    """It exchanges the folders in which the worker makes, and from which it brings, the files of requests."""
    victim = isolated.settings.state_dir / "victim"
    victim.mkdir(parents=True)
    (victim / "kept").write_text("the worker's")
    owner = isolated.settings.results_dir.stat()
    for path in (victim.parent, victim, victim / "kept"):
        os.chown(path, owner.st_uid, owner.st_gid)
    swaps = f"""
import os, shutil
folder = request['output_dir']
shutil.rmtree(folder)
os.symlink({str(victim)!r}, folder)
"""
    above = f"""
import os, shutil
task = os.path.dirname(request['output_dir'])
shutil.rmtree(task)
os.symlink({str(victim.parent)!r}, task)
"""
    for body in (swaps, above):
        task = of(fleet, "ana", ask(body))
        eventually(lambda task=task: task.state in ("FAILED", "DEAD"), within=60, what="the end of the task")
        assert "were not brought here" in (task.record().error or {})["message"]
        assert not (isolated.settings.results_dir / task.id / "attempt-1" / "kept").exists()

    assert (victim / "kept").read_text() == "the worker's"
    assert answer(of(fleet, "ana", ask("said = 1")))[1] == 1


def test_what_a_killed_worker_has_left_of_views_goes_with_its_next_start(fleet: TestFleet, open_folder: Path) -> None:
    left = open_folder / "w" / "results" / FOLDER / "w1" / "999999999-1" / "seen"
    left.mkdir(parents=True)

    worker_of(fleet, open_folder)

    assert not left.exists()


def test_without_isolation_owners_share_a_session_that_runs_no_code_of_theirs(
    fleet: TestFleet, open_folder: Path
) -> None:
    worker_of(fleet, open_folder)
    remote = {"source": {"type": "local", "identifier": "/models/one"}, "vllm": {"trust_remote_code": True}}

    plain = {answer(of(fleet, owner, ask("said = 1")))[0] for owner in ("ana", "eve")}
    code = {answer(of(fleet, owner, ask("said = 1", model=remote)))[0] for owner in ("ana", "eve")}

    assert len(plain) == 1
    assert len(code) == 2
