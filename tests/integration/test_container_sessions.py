"""Containers that answer many requests, on workers: in an engine, and as a process where there is none."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.spec.presets import load_preset
from tests.support.boxes import Box
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fake_engine import FakeContainer, FakeEngine, FakeImage
from tests.support.fleet import ROOT, TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient, promised

ENGINE, PLAIN = "engine", "plain"
COMMAND = ["python", "talks.py"]
BOXES = pytest.mark.parametrize("box", [ENGINE, PLAIN])

#: A session that does what a request says, one after the other, and notes the order.
TALKS = """
import json, os, pathlib, sys, threading, time
aborted, waiting = set(), []
arrived = threading.Condition()
def tell(event, **data):
    print(json.dumps({"event": event, **data}), flush=True)
def listen():
    for line in sys.stdin:
        told = json.loads(line)
        with arrived:
            if told["op"] == "abort":
                aborted.add(told["id"])
            else:
                waiting.append(told)
            arrived.notify_all()
    with arrived:
        waiting.append(None)
        arrived.notify_all()
tell("connection", status="connected")
tell("worker", status="loading", message="one model")
threading.Thread(target=listen, daemon=True).start()
gate = os.environ.get("LOADS_AFTER")
while gate and not os.path.exists(gate):
    time.sleep(0.01)
if os.environ.get("BROKEN"):
    print("no such model", file=sys.stderr, flush=True)
    sys.exit(3)
tell("ready")
served = 0
while True:
    with arrived:
        arrived.wait_for(lambda: waiting)
        told = waiting.pop(0)
    if told is None:
        break
    served += 1
    asked, id = told["request"], told["id"]
    if asked.get("print"):
        print(asked["print"], flush=True)
        print(asked["print"], "on stderr", file=sys.stderr, flush=True)
    if asked.get("die"):
        os._exit(7)
    if asked.get("until") or asked.get("deaf"):
        tell("progress", current=1, total=2)
    if asked.get("deaf"):
        threading.Event().wait()
    while asked.get("until") and not os.path.exists(asked["until"]) and id not in aborted:
        time.sleep(0.01)
    if id in aborted:
        tell("finish", id=id, status="cancelled")
        continue
    if asked.get("fail"):
        tell("finish", id=id, status="failed", error={"type": "NoAnswer", "message": asked["fail"]})
        continue
    folder = pathlib.Path(told["output_dir"])
    for name, text in asked.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        tell("artifact", path=name)
    if asked.get("link"):
        (folder / "link").symlink_to(asked["link"])
        (folder / "folder").symlink_to("/etc")
    value = {"pid": os.getpid(), "served": served, "say": asked.get("say"), "greeting": os.environ.get("GREETING"),
             "task": told["task_id"], "own": sorted(n for n in ("TASK_ID", "OUTPUT_DIR") if n in os.environ)}
    tell("result", id=id, value=value)
    tell("finish", id=id, status="completed")
"""
PRESET = {"image": "talks:latest", "command": COMMAND, "process": {"folder": "app"}, "mode": "session"}
PRESETS = {
    "talks": PRESET,
    "idle": {**PRESET, "idle_timeout": "1s"},
    "old": {**PRESET, "max_lifetime": "2s"},
    "short": {**PRESET, "timeout": "1s"},
    "broken": {**PRESET, "env": {"BROKEN": "yes"}},
    "once": {**PRESET, "mode": "one-off"},
}


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    (folder / "app").mkdir()
    (folder / "app" / "talks.py").write_text(TALKS)
    for name, preset in PRESETS.items():
        (folder / f"{name}.yaml").write_text(json.dumps(preset))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, presets: Path) -> Iterator[FakeEngine]:
    made = FakeEngine(tmp_path_factory.mktemp("e"))
    made.images["talks:latest"] = FakeImage(presets / "app")
    made.images["loading-worker:latest"] = FakeImage(ROOT / "examples" / "loading-worker")
    yield made
    made.close()
    assert made.refused == [], "the engine was asked for what its API does not know"


@pytest.fixture(scope="module")
def fleet(engine: FakeEngine, presets: Path, long_fleet: TestFleet) -> TestFleet:
    """One worker with an engine and one without, for all tests of this file; they end before the engine."""
    long_fleet.env["GPUFLOW_CONTAINER_PRESETS"] = str(presets)
    long_fleet.env["GPUFLOW_GRACE_SEC"] = str(patient(30))
    start(long_fleet, ENGINE, GPUFLOW_CONTAINER_ENGINE=engine.url)
    start(long_fleet, PLAIN, GPUFLOW_CONTAINER_ENGINE="none")
    return long_fleet


def start(fleet: TestFleet, name: str, **env: str) -> WorkerProcess:
    return fleet.start_worker(name, "--label", f"box={name}", env=env)


def worker_of(fleet: TestFleet, box: str) -> WorkerProcess:
    return next(worker for worker in fleet.workers if worker.name == box)


def spec(box: str, preset: str, request: Any = None, *, session: str = "", **more: Any) -> dict[str, Any]:
    """Return a request to a preset; `session` tells sessions of one preset apart, by a variable."""
    own = {"request": request} if request is not None else {}
    env = {"GREETING": session} if session else {}
    loads = more.pop("loads_after", None)
    return {
        "taskType": "container",
        "container": {"preset": preset, "env_vars": {**env, **({"LOADS_AFTER": str(loads)} if loads else {})}, **own},
        "resources": {"labels": {"box": box}, "hardware": {"gpu": {"count": 0}}},
        "retry": {"backoff_seconds": 0},
        **more,
    }


def ask(fleet: TestFleet, *given: Any, **more: Any) -> Task:
    return submit(spec(*given, **more), app=fleet.app)


def answer(fleet: TestFleet, *given: Any, **more: Any) -> dict[str, Any]:
    return ask(fleet, *given, **more).get(timeout=patient(60))


def failed(fleet: TestFleet, *given: Any, **more: Any) -> dict[str, Any]:
    task = ask(fleet, *given, **{"retry": {"max_attempts": 1}, **more})
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(60))
    error: dict[str, Any] = task.record().error
    return error


def logged(fleet: TestFleet, task: Task) -> str:
    return str([event.data for event in fleet.app.event_log.read(task.id) if event.name == "log"])


def working(fleet: TestFleet, task: Task) -> Task:
    """Wait until the container works on a request that has an `until`, or is `deaf`."""
    eventually(lambda: any(e.name == "progress" for e in fleet.app.event_log.read(task.id)), what="the request begun")
    return task


def sessions_of(worker: WorkerProcess) -> list[psutil.Process]:
    found = []
    for process in worker.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[-2:] == ["executors", "session"]:
                found.append(process)
    return found


def gone(pid: int, why: str) -> None:
    eventually(lambda: not psutil.pid_exists(pid), what=f"the end of the process after {why}")


def nothing_left(engine: FakeEngine, ours: FakeContainer, why: str) -> None:
    eventually(lambda: ours.id not in engine.containers, what=f"the end of the container after {why}")
    promised(ours.process is not None and ours.process.poll() is not None, f"a container runs after {why}")


# -- one container, one request after the other --------------------------------------------------------------------


@BOXES
def test_many_requests_are_answered_in_order_by_one_container_that_loads_once(
    fleet: TestFleet, box: str, tmp_path: Path
) -> None:
    before = worker_of(fleet, box).log().count("event=session_opened")
    gate = tmp_path / "loaded"
    tasks = [ask(fleet, box, "talks", {"say": n}, session="order", loads_after=gate) for n in range(8)]
    eventually(lambda: tasks[0].state == "RUNNING", what="the first one runs")
    gate.touch()

    results = [task.get(timeout=patient(60)) for task in tasks]

    assert [result["say"] for result in results] == list(range(8))
    assert [result["served"] for result in results] == list(range(1, 9)), "the order is that of the queue"
    assert [result["task"] for result in results] == [task.id for task in tasks]
    assert len({result["pid"] for result in results}) == 1
    assert {result["ran_as"] for result in results} == {"container" if box == ENGINE else "process"}
    assert results[0]["own"] == [], "variables of one task are none of a session"
    assert worker_of(fleet, box).log().count("event=session_opened") == before + 1


@BOXES
def test_what_a_request_leaves_and_says_is_its_own(fleet: TestFleet, box: str, tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    files = [{"a.txt": "one", "sub/b.txt": "two"}, {"c.txt": "three"}]
    tasks = [
        ask(fleet, box, "talks", {"files": wanted, "print": gate.name, "until": str(gate)}, session="own")
        for wanted, gate in zip(files, gates, strict=True)
    ]
    for task, gate in zip(tasks, gates, strict=True):
        eventually(lambda task=task, gate=gate: f"{gate.name} on stderr" in logged(fleet, task), what="its stderr")
        gate.touch()

    one, two = (task.get(timeout=patient(60)) for task in tasks)

    assert one["pid"] == two["pid"]
    kept = [{str(p.relative_to(r["result_dir"])) for p in Path(r["result_dir"]).rglob("*.txt")} for r in (one, two)]
    assert kept == [{"a.txt", "sub/b.txt"}, {"c.txt"}]
    assert Path(one["result_dir"], "sub", "b.txt").read_text() == "two"
    assert (one["output"], two["output"]) == ("first", "second")
    assert "second" not in logged(fleet, tasks[0])
    assert "first" not in logged(fleet, tasks[1])


def test_no_link_of_a_container_is_followed_out_of_it(fleet: TestFleet) -> None:
    task = ask(fleet, ENGINE, "talks", {"files": {"a.txt": "one"}, "link": "/etc/passwd"}, session="links")

    folder = Path(task.get(timeout=patient(60))["result_dir"])

    assert (folder / "a.txt").is_file()
    assert not (folder / "link").exists()
    assert not (folder / "folder").exists()
    assert logged(fleet, task).count("is no plain file or folder") == 2


@BOXES
def test_a_failure_is_that_of_one_request(fleet: TestFleet, box: str) -> None:
    pid = answer(fleet, box, "talks", {}, session="fails")["pid"]

    error = failed(fleet, box, "talks", {"fail": "nothing to say"}, session="fails")

    assert (error["type"], error["message"], error["retryable"]) == ("NoAnswer", "nothing to say", False)
    assert answer(fleet, box, "talks", {}, session="fails")["pid"] == pid


@BOXES
def test_a_cancel_ends_one_request_and_no_other(fleet: TestFleet, box: str, tmp_path: Path) -> None:
    gate = tmp_path / "never"
    first = working(fleet, ask(fleet, box, "talks", {"until": str(gate)}, session="cancel"))
    waits = ask(fleet, box, "talks", {"say": "next"}, session="cancel")

    first.cancel()

    eventually(lambda: first.state == "CANCELLED", what="the cancel")
    result = waits.get(timeout=patient(60))
    assert (result["served"], result["say"]) == (2, "next"), "the container that was told to stop goes on"
    assert waits.record().attempt == 1


@BOXES
def test_one_that_dies_in_a_request_costs_it_an_attempt_and_others_none(
    fleet: TestFleet, box: str, engine: FakeEngine
) -> None:
    first = answer(fleet, box, "talks", {}, session="dies")["pid"]
    task = ask(fleet, box, "talks", {"die": True}, session="dies", retry={"max_attempts": 2, "backoff_seconds": 0})
    after = ask(fleet, box, "talks", {}, session="dies")

    with pytest.raises(TaskFailed):
        task.get(timeout=patient(60))

    record = task.record()
    assert (record.error["type"], record.attempt) == ("EngineDied", 2)
    assert "exit code 7 in the middle of a request" in record.error["message"]
    assert after.get(timeout=patient(60))["pid"] != first
    assert after.record().failures == 0


def test_one_that_does_not_follow_an_abort_is_replaced_and_the_next_request_loses_nothing(fleet: TestFleet) -> None:
    pid = answer(fleet, PLAIN, "talks", {}, session="deaf")["pid"]
    deaf = working(fleet, ask(fleet, PLAIN, "talks", {"deaf": True}, session="deaf"))
    waits = ask(fleet, PLAIN, "talks", {"say": "next"}, session="deaf")

    deaf.cancel()

    result = waits.get(timeout=patient(60))
    assert (deaf.state, result["say"]) == ("CANCELLED", "next")
    assert result["pid"] != pid
    assert waits.record().failures == 0
    gone(pid, "an abort that it did not follow")


@BOXES
def test_one_that_cannot_load_says_why(fleet: TestFleet, box: str) -> None:
    error = failed(fleet, box, "broken", {})

    assert (error["type"], "exit code 3" in error["message"]) == ("ContainerFailed", True)
    assert "no such model" in error["message"]


def test_a_request_has_the_time_limit_of_its_preset(fleet: TestFleet, tmp_path: Path) -> None:
    pid = answer(fleet, PLAIN, "short", {})["pid"]

    error = failed(fleet, PLAIN, "short", {"until": str(tmp_path / "never")})

    assert (error["type"], error["retryable"]) == ("TimeLimitExceeded", False)
    assert answer(fleet, PLAIN, "short", {})["pid"] == pid


def test_a_session_that_runs_a_command_of_its_task_answers_one_owner(fleet: TestFleet) -> None:
    """The command stays in memory between two requests: another owner's would be told to it."""
    ours, again, theirs = (answered_to(fleet, owner, ENGINE, command=COMMAND) for owner in ("ana", "ana", "eve"))

    assert again["pid"] == ours["pid"]
    kept_apart(ours, theirs)


@BOXES
def test_a_session_on_a_worker_that_isolates_tasks_answers_one_owner(
    fleet: TestFleet, box: str, engine: FakeEngine
) -> None:
    need_bubblewrap()
    name = f"isolated-{box}"
    url = engine.url if box == ENGINE else "none"
    worker = start(fleet, name, GPUFLOW_CONTAINER_ENGINE=url, GPUFLOW_ISOLATE="bubblewrap")

    ours, again, theirs = (answered_to(fleet, owner, name) for owner in ("ana", "ana", "eve"))

    assert again["pid"] == ours["pid"]
    kept_apart(ours, theirs)
    assert worker.log().count("event=session_opened") == 2


@BOXES
def test_a_session_that_runs_its_preset_alone_answers_all_owners(fleet: TestFleet, box: str) -> None:
    assert len({answered_to(fleet, owner, box)["pid"] for owner in ("ana", "eve")}) == 1


def answered_to(fleet: TestFleet, owner: str, box: str, **own: Any) -> dict[str, Any]:
    asked = spec(box, "talks", {}, session="owned")
    asked["container"] |= own
    task = submit(asked, owner=owner, app=fleet.app)
    result: dict[str, Any] = task.get(timeout=patient(60))
    assert task.record().failures == 0, "the session of another owner costs no attempt"
    return result


def kept_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert theirs["pid"] != ours["pid"]
    assert theirs["served"] == 1, "nothing that the other owner has left is in it"
    gone(ours["pid"], "a request of another owner")


# -- limits, and ends ----------------------------------------------------------------------------------------------


@BOXES
def test_an_idle_one_is_ended(fleet: TestFleet, engine: FakeEngine, box: str) -> None:
    before = len(engine.all)
    pid = answer(fleet, box, "idle", {})["pid"]

    gone(pid, "its idle time")

    if box == ENGINE:
        nothing_left(engine, engine.all[before], "its idle time")
    assert answer(fleet, box, "idle", {})["pid"] != pid


@BOXES
def test_an_old_one_ends_what_it_does_and_takes_no_more(fleet: TestFleet, box: str, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    running = working(fleet, ask(fleet, box, "old", {"until": str(gate), "say": "first"}))
    eventually(lambda: "event=session_too_old" in worker_of(fleet, box).log(), what="its age")
    waits = ask(fleet, box, "old", {"say": "second"})

    gate.touch()

    first, second = (task.get(timeout=patient(60)) for task in (running, waits))
    assert (first["say"], second["say"]) == ("first", "second")
    assert first["pid"] != second["pid"]
    assert (running.record().attempt, waits.record().failures) == (1, 0)
    gone(first["pid"], "its last request")


@pytest.mark.parametrize("victim", ["session", "shim", "worker"])
def test_kill_9_leaves_no_container(fleet: TestFleet, engine: FakeEngine, victim: str, tmp_path: Path) -> None:
    name = f"dies-{victim}"
    worker = start(fleet, name, GPUFLOW_CONTAINER_ENGINE=engine.url)
    before = len(engine.all)
    task = working(fleet, ask(fleet, name, "talks", {"until": str(tmp_path / "never")}, retry={"max_attempts": 1}))
    (ours,) = engine.all[before:]
    (child,) = sessions_of(worker)

    {"session": child, "shim": child.parent(), "worker": worker.process}[victim].kill()

    nothing_left(engine, ours, f"kill -9 of the {victim}")
    eventually(
        lambda: not list((fleet.settings.state_dir / "containers").glob(f"{ours.name.removeprefix('gpuflow-')}*")),
        what="the end of its folder and its lock",
    )
    if victim != "worker":
        eventually(lambda: task.state in ("DEAD", "FAILED"), what="the end of the task")
    fleet.app.control.revoke(task.id)


def test_a_stopped_worker_leaves_none(fleet: TestFleet, engine: FakeEngine) -> None:
    worker = start(fleet, "stops", GPUFLOW_CONTAINER_ENGINE=engine.url)
    before = len(engine.all)
    answer(fleet, "stops", "talks", {})
    (ours,) = engine.all[before:]

    assert worker.stop() == 0

    nothing_left(engine, ours, "the stop of its worker")
    assert ours.code == 0, "the end of its input is a way to end for itself"


# -- without sessions, and what is refused ---------------------------------------------------------------------------


def test_where_no_session_is_kept_each_request_has_a_container(fleet: TestFleet, engine: FakeEngine) -> None:
    off = {"GPUFLOW_SESSION_IDLE_SEC": "0"}
    start(fleet, "none-1", GPUFLOW_CONTAINER_ENGINE=engine.url, **off)
    start(fleet, "none-2", GPUFLOW_CONTAINER_ENGINE="none", **off)

    for box in ("none-1", "none-2"):
        one, two = (answer(fleet, box, "talks", {"files": {"a.txt": "one"}}) for _ in range(2))
        assert (one["served"], two["served"]) == (1, 1)
        assert one["pid"] != two["pid"]
        assert Path(two["result_dir"], "a.txt").read_text() == "one"


def test_a_request_needs_a_session_and_a_session_a_request(fleet: TestFleet) -> None:
    lacks, useless = failed(fleet, PLAIN, "talks"), failed(fleet, PLAIN, "once", {"say": 1})

    assert (lacks["type"], "answers requests (mode: session); give one" in lacks["message"]) == (
        "InvalidTemplate",
        True,
    )
    assert (useless["type"], "takes no requests" in useless["message"]) == ("InvalidTemplate", True)


def test_a_preset_that_has_changed_is_another_session(fleet: TestFleet, presets: Path) -> None:
    first = answer(fleet, PLAIN, "talks", {}, session="changes")
    changed = {**PRESET, "env": {"MODEL_NAME": "other"}}
    try:
        (presets / "talks.yaml").write_text(json.dumps(changed))
        second = answer(fleet, PLAIN, "talks", {}, session="changes")
    finally:
        (presets / "talks.yaml").write_text(json.dumps(PRESET))

    assert first["pid"] != second["pid"]


def test_an_idle_container_leaves_its_gpu_to_another_task(fleet: TestFleet, presets: Path) -> None:
    with Box(fleet, "gpu", "1xA100-80GB") as box:
        box.start("warm", GPUFLOW_CONTAINER_ENGINE="none", GPUFLOW_CONTAINER_PRESETS=str(presets))
        wanted = {name: part for name, part in spec("gpu", "talks", {}).items() if name != "resources"}
        pid = box.submit("A100:1", **wanted).get(timeout=patient(60))["pid"]

        assert box.submit("A100:1").get(timeout=patient(60))["gpus"]

        gone(pid, "its eviction")


@BOXES
def test_the_shipped_pipeline_loads_once(fleet: TestFleet, box: str) -> None:
    started = time.strftime("%Y%m%d-%H%M%S")
    template = load_preset("pipelines", "container-session")
    template["spec"]["resources"]["labels"] = {"box": box}
    run = submit_pipeline(template, app=fleet.app)

    run.wait(timeout=patient(120))

    assert run["second"].result["text"] == "Hello Hello Ana!!"
    assert Path(run["second"].result["result_dir"], "answer.txt").read_text() == "Hello Hello Ana!!\n"
    logs = (fleet.settings.state_dir / "sessions" / box).glob("*-loading-session.log")
    assert len([path for path in logs if path.name >= started]) == 1
