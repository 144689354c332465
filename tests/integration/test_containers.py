"""The task type `container` on workers: in an engine, and as a plain process where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.fleet.registry import Fleet
from tests.support.fake_engine import FakeContainer, FakeEngine, FakeImage
from tests.support.fleet import ROOT, TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient, promised

ENGINE, PLAIN = "engine", "plain"
BOXES = pytest.mark.parametrize("box", [ENGINE, PLAIN])

#: The lines of the protocol's first description, in the order in which a worker sends them.
SEED_LINES = (
    '{"event": "connection", "status": "connected"}',
    '{"event": "worker", "status": "loading", "message": "Loading model..."}',
    '{"event": "text_delta", "delta": "Hello "}',
    '{"event": "text", "content": "Hello World!"}',
    '{"event": "finish", "status": "completed"}',
)
PRESETS = {
    "lines": {
        "docker_image": "lines:latest",
        "command": ["python", "/app/lines.py"],
        "env_vars": {"MODEL_NAME": "test-loading"},
        "process": {"folder": "app", "command": ["python", "lines.py"]},
    },
    "program": {
        "image": "program:latest",
        "command": ["python", "program.py"],
        "process": {"folder": "app"},
    },
    "short": {
        "image": "program:latest",
        "command": ["python", "program.py"],
        "timeout": "1s",
        "process": {"folder": "app"},
    },
}
LINES = "import os, sys\nprint(os.environ['LINES'], flush=True)\nsys.exit(int(os.environ.get('CODE', '0')))\n"
PROGRAM = "import os\nexec(os.environ['PROGRAM'])\n"


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    (folder / "app").mkdir()
    (folder / "app" / "lines.py").write_text(LINES)
    (folder / "app" / "program.py").write_text(PROGRAM)
    for name, preset in PRESETS.items():
        (folder / f"{name}.yaml").write_text(json.dumps(preset))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, presets: Path) -> Iterator[FakeEngine]:
    made = FakeEngine(tmp_path_factory.mktemp("e"))
    for name in ("lines:latest", "program:latest"):
        made.images[name] = FakeImage(presets / "app")
    made.images["loading-worker:latest"] = FakeImage(ROOT / "examples" / "loading-worker")
    yield made
    made.close()
    assert made.refused == [], "the engine was asked for what its API does not know"


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet, engine: FakeEngine, presets: Path) -> TestFleet:
    """One worker with an engine and one without, for all tests of this file."""
    long_fleet.env["GPUFLOW_CONTAINER_PRESETS"] = str(presets)
    # What cleans up has all the time that a busy machine may take.
    start_engine_worker(long_fleet, engine, ENGINE, GPUFLOW_GRACE_SEC=str(patient(60)))
    long_fleet.start_worker(PLAIN, "--label", f"box={PLAIN}", env={"GPUFLOW_CONTAINER_ENGINE": "none"})
    return long_fleet


def start_engine_worker(fleet: TestFleet, engine: FakeEngine, name: str, **env: str) -> WorkerProcess:
    return fleet.start_worker(name, "--label", f"box={name}", env={"GPUFLOW_CONTAINER_ENGINE": engine.url, **env})


def spec(box: str, preset: str | None, **more: Any) -> dict[str, Any]:
    own = {name: more.pop(name) for name in list(more) if name in ("env_vars", "image", "mounts", "command")}
    hardware = more.pop("hardware", {})
    return {
        "taskType": "container",
        "container": {**({"preset": preset} if preset else {}), **own},
        "resources": {"labels": {"box": box}, "hardware": {"gpu": {"count": 0}, **hardware}},
        **more,
    }


def lines(box: str, *said: str, code: int = 0, **more: Any) -> dict[str, Any]:
    return spec(box, "lines", env_vars={"LINES": "\n".join(said), "CODE": code}, **more)


def program(box: str, text: str, preset: str = "program", **more: Any) -> dict[str, Any]:
    return spec(box, preset, env_vars={"PROGRAM": text}, **more)


def ran(fleet: TestFleet, wanted: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    task = submit(wanted, app=fleet.app)
    return task, task.get(timeout=patient(120))


def failed(fleet: TestFleet, wanted: dict[str, Any]) -> dict[str, Any]:
    task = submit({"retry": {"max_attempts": 1}, **wanted}, app=fleet.app)
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(120))
    error: dict[str, Any] = task.record().error
    return error


def told(fleet: TestFleet, task: Task, *names: str) -> list[dict[str, Any]]:
    return [
        {"event": event.name, **event.data}
        for event in fleet.app.event_log.read(task.id)
        if not names or event.name in names
    ]


def started(fleet: TestFleet, task: Task, word: str = "started") -> None:
    eventually(lambda: word in str(told(fleet, task, "log")), what="the program runs")


def of_task(engine: FakeEngine, task: Task) -> list[FakeContainer]:
    return engine.labelled("gpuflow.task", task.id)


def gone(engine: FakeEngine, task: Task, ours: FakeContainer, why: str) -> None:
    eventually(lambda: not of_task(engine, task), what=f"the end of the container after {why}")
    promised(ours.process is not None and ours.process.poll() is not None, f"a container runs after {why}")


# -- events and ends --------------------------------------------------------------------------------------------


@BOXES
def test_the_events_of_the_first_description_line_by_line(fleet: TestFleet, box: str) -> None:
    task, result = ran(fleet, lines(box, *SEED_LINES))

    said = [json.loads(line) for line in SEED_LINES]
    assert [event for event in told(fleet, task) if event in said] == said
    names = ("connection", "worker", "text_delta", "text", "finish")
    extra = [event for event in told(fleet, task, *names) if event not in said]
    assert [event["status"] for event in extra] == (["working"] if box == ENGINE else ["fallback", "working"])
    assert (result["exit_code"], result["ran_as"]) == (0, "container" if box == ENGINE else "process")


@BOXES
def test_how_it_ends_is_its_finish_and_its_exit_code(fleet: TestFleet, box: str) -> None:
    connection, loading, completed = SEED_LINES[0], SEED_LINES[1], SEED_LINES[-1]
    bad = '{"event": "finish", "status": "failed", "error": {"type": "NoModel", "message": "no such model"}}'

    assert failed(fleet, lines(box, connection, completed, code=3))["type"] == "Contradiction"
    assert failed(fleet, lines(box, connection, loading))["type"] == "NoFinish"
    for code in (0, 1):
        error = failed(fleet, lines(box, connection, bad, code=code))
        assert (error["type"], error["message"]) == ("NoModel", "no such model")
    plain = failed(fleet, lines(box, "out of luck", code=4))
    assert (plain["type"], "exit code 4" in plain["message"]) == ("ContainerFailed", True)
    assert "out of luck" in plain["message"]
    killed = failed(fleet, program(box, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert (killed["type"], killed["retryable"]) == ("ContainerKilled", True)
    assert ran(fleet, lines(box, "knows no events"))[1]["output"] == "knows no events"


@BOXES
def test_one_that_says_nothing_for_ever_is_ended_by_its_timeout(fleet: TestFleet, engine: FakeEngine, box: str) -> None:
    silent = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(3600)"

    for wanted in (program(box, silent, timeout="1s"), program(box, silent, preset="short")):
        error = failed(fleet, wanted)
        assert (error["type"], error["retryable"]) == ("TimeLimitExceeded", False)
    assert engine.containers == {}


def test_a_process_in_place_of_a_container_is_said_aloud(fleet: TestFleet) -> None:
    task, result = ran(fleet, lines(PLAIN, "hello", hardware={"memory": "64Mi"}))

    (said,) = [event["message"] for event in told(fleet, task, "worker") if event["status"] == "fallback"]
    assert said == result["fallback"]
    assert "lines runs as a plain process, not in a container: GPUFLOW_CONTAINER_ENGINE is none" in said
    assert said.endswith("not applied: memory")


def test_the_shipped_pipeline(fleet: TestFleet) -> None:
    run = submit_pipeline("container", app=fleet.app)

    run.wait(timeout=patient(120))

    assert run["second"].result["text"] == "Hello Hello Ana!!"


# -- what it is given ----------------------------------------------------------------------------------------------


@BOXES
def test_what_it_is_told_and_what_it_leaves(fleet: TestFleet, box: str) -> None:
    text = """
import json, os
names = ("TASK_ID", "ATTEMPT", "MODEL_NAME", "GREETING", "GPU_DEVICE")
open(os.path.join(os.environ["OUTPUT_DIR"], "seen.json"), "w").write(json.dumps({n: os.environ[n] for n in names}))
print(json.dumps({"event": "artifact", "path": "seen.json"}))
print(json.dumps({"event": "result", "value": {"rows": 3}}))
print(json.dumps({"event": "finish", "status": "completed"}))
"""
    model = {"source": {"type": "huggingface", "identifier": "acme/tiny"}}
    task, result = ran(fleet, program(box, text, model=model, env={"GREETING": "hello"}))

    assert result["rows"] == 3
    seen = json.loads(Path(result["result_dir"], "seen.json").read_text())
    assert seen == {
        "TASK_ID": task.id, "ATTEMPT": "1", "MODEL_NAME": "acme/tiny", "GREETING": "hello", "GPU_DEVICE": ""
    }  # fmt: skip


def test_a_container_sees_what_it_was_given_and_nothing_of_the_worker(fleet: TestFleet, engine: FakeEngine) -> None:
    before = len(engine.all)
    task, _ = ran(fleet, lines(ENGINE, "hello", hardware={"cpu": "2", "memory": "64Mi"}))

    (made,) = engine.all[before:]
    given = dict(text.split("=", 1) for text in made.config["Env"])
    assert set(given) == {
        "MODEL_NAME", "LINES", "CODE", "TASK_ID", "ATTEMPT", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE",
        "NVIDIA_VISIBLE_DEVICES", "OUTPUT_DIR", "CHECKPOINT_DIR", "NOTICE_SECONDS", "PYTHONUNBUFFERED",
    }  # fmt: skip
    assert given["NVIDIA_VISIBLE_DEVICES"] == "void"
    host = made.host
    output = str(fleet.results / task.id / "attempt-1")
    assert host["Mounts"] == [{"Target": output, "Source": output, "Type": "bind", "ReadOnly": False}]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (64 << 20, 64 << 20, 2_000_000_000)
    assert (host["PidsLimit"], host["CapDrop"], host["SecurityOpt"]) == (4096, ["ALL"], ["no-new-privileges"])
    assert host.get("NetworkMode") != "host"
    assert "DeviceRequests" not in host
    labels = made.config["Labels"]
    assert (labels["gpuflow.task"], labels["gpuflow.attempt"]) == (task.id, "1")


# -- what is refused -------------------------------------------------------------------------------------------------


def test_images_and_paths_are_the_operators_to_allow(fleet: TestFleet, engine: FakeEngine, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "way-out").symlink_to("/etc")
    (allowed / "data").mkdir()
    start_engine_worker(fleet, engine, "open", GPUFLOW_CONTAINER_IMAGES="acme/*", GPUFLOW_CONTAINER_MOUNTS=str(allowed))
    engine.registry["acme/tool:latest"] = engine.images["lines:latest"]
    say = {"env": {"LINES": "hello"}, "command": ["python", "/app/lines.py"]}

    # Given a worker with the default settings
    error = failed(fleet, spec(ENGINE, None, image="acme/tool", **say))
    assert (error["type"], "GPUFLOW_CONTAINER_IMAGES" in error["message"]) == ("ContainerRefused", True)
    error = failed(fleet, spec(ENGINE, "lines", mounts=[f"{allowed}:/data"]))
    assert (error["type"], "GPUFLOW_CONTAINER_MOUNTS" in error["message"]) == ("ContainerRefused", True)
    local = {"source": {"type": "local", "identifier": "/etc"}}
    assert failed(fleet, spec(ENGINE, "lines", model=local))["type"] == "NotAllowed"
    local["source"]["identifier"] = str(tmp_path)  # which tasks may read, and no container may mount
    assert failed(fleet, spec(ENGINE, "lines", model=local))["type"] == "ContainerRefused"
    # And one whose operator allows some
    assert failed(fleet, spec("open", None, image="acme.evil.io/tool", **say))["type"] == "ContainerRefused"
    assert failed(fleet, spec("open", None, image="acme/missing", **say))["type"] == "ImageNotFound"
    error = failed(fleet, spec("open", "lines", mounts=[f"{allowed}/way-out:/data"]))
    assert (error["type"], "/etc is in no folder of" in error["message"]) == ("ContainerRefused", True)
    # Then what it allows runs: pulled once, mounted read-only, the model at /models
    local = {"source": {"type": "local", "identifier": str(allowed)}}
    before = len(engine.all)
    _, result = ran(fleet, spec("open", None, image="acme/tool", mounts=[f"{allowed}/data:/data"], model=local, **say))
    assert result["output"] == "hello"
    (made,) = engine.all[before:]
    mounts = {mount["Target"]: (mount["Source"], mount["ReadOnly"]) for mount in made.host["Mounts"]}
    assert (mounts["/data"], mounts["/models"]) == ((str(allowed / "data"), True), (str(allowed), True))
    assert "MODEL_PATH=/models" in made.config["Env"]


def test_an_image_by_itself_needs_an_engine(fleet: TestFleet) -> None:
    error = failed(fleet, spec(PLAIN, None, image="program:latest"))

    assert (error["type"], error["retryable"]) == ("EngineUnavailable", True)
    assert "an image runs in an engine only" in error["message"]


def test_an_unknown_preset_and_an_engine_that_does_not_answer(fleet: TestFleet, tmp_path: Path) -> None:
    error = failed(fleet, spec(ENGINE, "line"))
    assert "did you mean lines" in error["message"]

    gone = {"GPUFLOW_CONTAINER_ENGINE": f"unix://{tmp_path}/none.sock"}
    fleet.start_worker("named", "--label", "box=named", env=gone)
    error = failed(fleet, lines("named", "hello"))
    assert (error["type"], error["retryable"]) == ("EngineUnavailable", True)  # never as a process in silence


# -- signals, and deaths ---------------------------------------------------------------------------------------


LONG = """
import signal, sys, time
def leave(number, _):
    print("cleaning up", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
print("started", flush=True)
time.sleep(3600)
"""


@BOXES
def test_a_cancel_lets_it_clean_up_and_ends_it(fleet: TestFleet, engine: FakeEngine, box: str) -> None:
    task = submit(program(box, LONG), app=fleet.app)
    started(fleet, task)
    ours = of_task(engine, task)

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    assert engine.containers == {}
    assert [one.code for one in ours] == ([143] if box == ENGINE else [])


def test_a_cancel_ends_one_that_does_not_listen(fleet: TestFleet, engine: FakeEngine) -> None:
    start_engine_worker(fleet, engine, "strict", GPUFLOW_GRACE_SEC="0.5")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('started', flush=True)\n"
    task = submit(program("strict", deaf + "time.sleep(3600)"), app=fleet.app)
    started(fleet, task)
    (ours,) = of_task(engine, task)

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    gone(engine, task, ours, "a cancel")


def test_kill_9_of_the_child_leaves_no_container(fleet: TestFleet, engine: FakeEngine) -> None:
    task = submit(program(ENGINE, LONG, retry={"max_attempts": 1}), app=fleet.app)
    started(fleet, task)
    (ours,) = of_task(engine, task)
    (child,) = next(worker for worker in fleet.workers if worker.name == ENGINE).supervised()

    child.kill()

    with pytest.raises(TaskFailed):
        task.get(timeout=patient(60))
    promised(not of_task(engine, task), "the attempt has ended and its container is there")
    gone(engine, task, ours, "kill -9 of the child")


def test_kill_9_of_the_shim_or_the_worker_leaves_no_container(fleet: TestFleet, engine: FakeEngine) -> None:
    worker = start_engine_worker(fleet, engine, "dies")
    for victim in ("shim", "worker"):
        task = submit(program("dies", LONG, retry={"max_attempts": 1}), app=fleet.app)
        started(fleet, task)
        (ours,) = of_task(engine, task)
        (child,) = worker.supervised()

        (child.parent() if victim == "shim" else worker.process).kill()

        gone(engine, task, ours, f"kill -9 of the {victim}")
        if victim == "shim":
            eventually(lambda task=task: task.state in ("DEAD", "FAILED"), what="the end of the task")
    fleet.app.control.revoke(task.id)


def test_a_container_that_outlived_all_its_processes_is_removed_at_the_next_start(
    fleet: TestFleet, engine: FakeEngine
) -> None:
    # Given a worker of which nothing survives, not even the process that forks shims
    worker = start_engine_worker(fleet, engine, "falls")
    task = submit(program("falls", LONG), app=fleet.app)
    started(fleet, task)
    (ours,) = of_task(engine, task)
    others = submit(program(ENGINE, LONG), app=fleet.app)
    started(fleet, others)
    (living,) = of_task(engine, others)
    for child in worker.children():
        child.kill()
    worker.process.kill()
    worker.process.wait()
    assert of_task(engine, task) == [ours]

    # When a worker starts on the machine
    start_engine_worker(fleet, engine, "rises")

    # Then it is gone, and that of a living attempt is not
    gone(engine, task, ours, "the start of a worker")
    assert living.status == "running"
    for one in (task, others):
        one.cancel()
    eventually(lambda: others.state == "CANCELLED", what="the cancel")


def test_after_a_notice_it_goes_on_elsewhere(fleet: TestFleet, engine: FakeEngine) -> None:
    saves = """
import os, pathlib, signal, sys, time
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
print("started", flush=True)
time.sleep(3600)
"""
    first = start_engine_worker(fleet, engine, "moves-1")
    wanted = program("moves-1", saves)
    wanted["resources"]["labels"] = {"box": "moves-*"}
    task = submit(wanted, app=fleet.app)
    started(fleet, task)
    Fleet(fleet.app.redis, fleet.app.keys).ask_to_drain(first.name, 0)
    start_engine_worker(fleet, engine, "moves-2")

    assert task.get(timeout=patient(120))["output"] == "from 5"
    assert task.record().attempt == 2
