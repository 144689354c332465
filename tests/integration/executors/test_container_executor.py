"""The executor of containers by itself: what the engine is asked for, and what a container cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.protocol import Event, Request, parse_line
from gpuflow.settings import Settings
from gpuflow.worker.containers import removal
from gpuflow.worker.containers.engines import find_engine
from gpuflow.worker.containers.local import local_container
from gpuflow.worker.standalone import Ended, Standalone, environment_for
from tests.gate import leftovers
from tests.support.fake_engine import FakeEngine, FakeImage
from tests.support.fleet import ROOT
from tests.support.waiting import eventually, patient

GPUS = ("GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-2222-3333-4444-555555555555")
SAY = ["python", "-c", "print('hello')"]


class Box:
    """A machine with an engine, and presets of its operator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = FakeEngine(folder)
        self.engine.images["tool:latest"] = FakeImage(folder)
        self.runs = 0

    def run(
        self,
        preset: dict[str, Any],
        *,
        gpus: tuple[str, ...] = (),
        when_started: Callable[[], None] | None = None,
        settings: dict[str, Any] | None = None,
        **section: Any,
    ) -> tuple[Ended, list[Event]]:
        self.runs += 1
        (self.folder / "mine.yaml").write_text(json.dumps({"image": "tool:latest", "command": SAY, **preset}))
        mine = Settings(
            container_engine=self.engine.url,
            container_presets=self.folder,
            state_dir=self.folder / "state",
            pass_env=(leftovers.VARIABLE,),
            **(settings or {}),
        )
        spec = local_container({"taskType": "container", "container": {"preset": "mine", **section}}, mine)
        request = Request(
            task_id=f"task-{self.runs}",
            task_type="container",
            spec=spec,
            output_dir=str(self.folder / f"out-{self.runs}"),
            gpus=gpus,
        )
        environment = environment_for(request, mine)
        if not gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        events: list[Event] = []

        def on_event(event: Event) -> None:
            events.append(event)
            if when_started is not None and event.data.get("message") == "started":
                eventually(lambda: any(call.endswith("/wait") for call in self.engine.calls), what="the wait")
                when_started()

        runner = Standalone(request, environment=environment, on_event=on_event, grace_seconds=patient(30))
        return runner.run(), events

    @property
    def made(self) -> dict[str, Any]:
        """What the last container was created with."""
        return dict(self.engine.all[-1].config)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    left = dict(made.engine.containers)
    made.engine.close()
    assert left == {}


def env_of(config: dict[str, Any]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in config["Env"])


def test_the_claimed_gpus_are_asked_for_by_their_ids(box: Box) -> None:
    ended, _ = box.run({"gpus": 2, "shm_size": "2Gi", "network": "host", "user": "1234:99"}, gpus=GPUS)

    assert ended.completed, ended.error
    host = box.made["HostConfig"]
    (device,) = host["DeviceRequests"]
    assert (device["DeviceIDs"], device["Capabilities"]) == (list(GPUS), [["gpu"]])
    assert not device.get("Count")
    assert (host["ShmSize"], host["NetworkMode"], box.made["User"]) == (2 << 30, "host", "1234:99")
    given = env_of(box.made)
    assert given["CUDA_VISIBLE_DEVICES"] == given["GPU_DEVICE"] == given["NVIDIA_VISIBLE_DEVICES"] == ",".join(GPUS)
    assert box.engine.refused == []


def test_a_preset_without_gpus_sees_none_and_one_with_too_few_is_refused(box: Box) -> None:
    box.run({"gpus": 0}, gpus=GPUS)
    assert "DeviceRequests" not in box.made["HostConfig"]
    assert env_of(box.made)["NVIDIA_VISIBLE_DEVICES"] == "void"

    ended, _ = box.run({"gpus": 3}, gpus=GPUS)
    assert ended.error is not None
    assert (ended.error["type"], "needs 3 GPUs and the task holds 2" in ended.error["message"]) == ("BadInput", True)


def test_the_user_is_the_one_who_owns_the_results(box: Box) -> None:
    box.run({})
    assert box.made["User"] == f"{os.getuid()}:{os.getgid()}"

    box.engine.security.append("name=rootless")
    box.run({})
    assert box.made["User"] == "0:0"


def test_an_image_is_pulled_once_and_never_where_the_preset_says_so(box: Box) -> None:
    box.engine.registry["far:1"] = FakeImage(box.folder)

    ended, events = box.run({"image": "far:1"})
    assert ended.completed, ended.error
    assert "pulling image far:1" in [event.data.get("message") for event in events]
    _, events = box.run({"image": "far:1"})
    assert "pulling image far:1" not in [event.data.get("message") for event in events]

    ended, _ = box.run({"image": "local:1", "pull": "never"})
    assert ended.error is not None
    assert (ended.error["type"], ended.error["retryable"]) == ("ImageNotFound", False)


def test_one_that_the_kernel_ended_for_its_memory_says_so(box: Box) -> None:
    text = "import os, signal; print('grown', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    start = box.engine.__class__.find

    def find(engine: FakeEngine, reference: str) -> Any:
        container = start(engine, reference)
        container.oom_killed = True
        return container

    box.engine.find = find.__get__(box.engine)  # type: ignore[method-assign]
    ended, _ = box.run({"command": ["python", "-c", text], "memory": "64Mi"})

    assert ended.error is not None
    assert (ended.error["type"], ended.error["retryable"]) == ("OutOfMemory", True)
    assert "64 MiB" in ended.error["message"]


def test_the_result_of_a_container_is_no_way_to_read_the_host(box: Box) -> None:
    secret = box.folder / "secret.json"
    secret.write_text('{"token": "of the host"}')
    text = f"""
import json, os
os.symlink({str(secret)!r}, os.path.join(os.environ["OUTPUT_DIR"], ".result.json"))
print(json.dumps({{"event": "result", "file": ".result.json"}}))
print(json.dumps({{"event": "finish", "status": "completed"}}))
"""
    ended, _ = box.run({"command": ["python", "-c", text]})

    assert ended.error is not None
    assert ended.error["type"] == "BadResult"


def test_a_preset_is_what_its_task_makes_of_it(box: Box) -> None:
    ended, _ = box.run({"env": {"A": "1", "B": "2"}}, env_vars={"B": "3"}, command="python -c 'print(1 + 1)'")

    assert ended.result["output"] == "2"
    assert box.made["Cmd"] == ["python", "-c", "print(1 + 1)"]
    given = env_of(box.made)
    assert (given["A"], given["B"]) == ("1", "3")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"network": "host"}, "container.network: Input should be 'none' or 'bridge'"),
        ({"engine": "/tmp/other.sock", "run": "x"}, "container.engine: Extra inputs are not permitted"),
        ({"mounts": ["/a/${env:X}:/b"]}, "is no mount"),
        ({"command": "'"}, "container.command cannot be split into words"),
        ({"mounts": ["/tmp:/a:rw"]}, "read-only"),
        ({"preset": None, "image": "${env:X}"}, "is no image reference"),
    ],
)
def test_what_a_reference_has_become_is_looked_at_on_the_worker(
    tmp_path: Path, section: dict[str, Any], problem: str
) -> None:
    (tmp_path / "mine.yaml").write_text("image: tool")
    settings = Settings(container_engine="none", container_presets=tmp_path, container_mounts=("/tmp",))

    with pytest.raises(GPUFlowError) as caught:
        local_container({"taskType": "container", "container": {"preset": "mine", **section}}, settings)

    assert problem in str(caught.value)


def test_without_the_sdk_an_engine_is_not_passed_over(box: Box) -> None:
    (box.folder / "docker.py").write_text("raise ImportError('no docker here')\n")
    spec = local_container(
        {"taskType": "container", "container": {"image": "tool:latest"}},
        Settings(container_engine=box.engine.url, container_images=("*",), state_dir=box.folder),
    )
    request = Request(task_id="t", task_type="container", spec=spec, output_dir=str(box.folder / "out"))
    path = os.pathsep.join((str(box.folder), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "executors"],
        input=request.to_json().encode(),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )

    finish = parse_line(done.stdout.splitlines()[-1]).data
    assert finish["error"]["type"] == "MissingDependency"
    assert "pip install 'gpuflow[container]'" in finish["error"]["message"]


@pytest.mark.parametrize("cut", ["cut", "cut_output"])
def test_an_engine_that_goes_away_ends_the_attempt_and_another_may_do(box: Box, cut: str) -> None:
    text = "import time; print('started', flush=True); time.sleep(3600)"

    ended, _ = box.run({"command": ["python", "-c", text]}, when_started=getattr(box.engine, cut))

    assert ended.error is not None
    assert (ended.error["type"], ended.error["retryable"]) == ("EngineUnavailable", True)
    # It was back when the shim looked.
    assert box.engine.containers == {}


def test_the_example_runs_by_itself(tmp_path: Path) -> None:
    example = ROOT / "examples" / "loading-worker"
    environment = {"PATH": os.environ["PATH"], "OUTPUT_DIR": str(tmp_path), "PROMPT": "Ana", "STEP_SECONDS": "0"}
    argv = [sys.executable, str(example / "worker.py")]

    done = subprocess.run(argv, env=environment, capture_output=True, check=True)

    events = [parse_line(line) for line in done.stdout.splitlines()]
    names = [event.name for event in events if event.name != "progress"]
    assert names == [
        "connection", "worker", "worker", "worker", "text_delta", "text_delta", "text", "artifact", "worker", "result",
        "finish",
    ]  # fmt: skip
    statuses = [event.data["status"] for event in events if event.name in ("connection", "worker", "finish")]
    assert statuses == ["connected", "initializing", "loading", "working", "cleaning_up", "completed"]
    assert (tmp_path / "answer.txt").read_text() == "Hello Ana!\n"
    bad = subprocess.run(argv, env={**environment, "LOAD_STEPS": "many"}, capture_output=True, check=False)
    assert (bad.returncode, parse_line(bad.stdout.splitlines()[-1]).data["status"]) == (1, "failed")
    copied = [line.split()[1] for line in (example / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert all((example / name).is_file() for name in copied)
    assert os.access(example / "build.sh", os.X_OK)


def test_the_engine_is_found_by_its_socket(box: Box, tmp_path: Path) -> None:
    found = find_engine("auto", {"DOCKER_HOST": box.engine.url})
    assert (found.path, found.is_named) == (box.engine.path, False)
    assert find_engine("none", {"DOCKER_HOST": box.engine.url}).path is None
    assert find_engine(box.engine.url).is_named

    nothing = find_engine("auto", {"DOCKER_HOST": f"unix://{tmp_path}/no.sock"})
    assert nothing.path is None or nothing.path != f"{tmp_path}/no.sock"


def test_what_removes_containers_removes_those_of_its_run_alone(box: Box, tmp_path: Path) -> None:
    import docker

    client = docker.APIClient(base_url=box.engine.url, version="auto")
    lock = tmp_path / "run.lock"
    labels = {removal.RUN_LABEL: "mine", removal.LOCK_LABEL: str(lock)}
    for one in (labels, {removal.RUN_LABEL: "mine-not"}, {}):
        made = client.create_container("tool:latest", ["sleep", "3600"], labels=one)
        client.start(made["Id"])
    ours, *foreign = box.engine.all
    argv = [sys.executable, "-I", "-S", removal.__file__, box.engine.path, "mine", str(lock)]

    # Without the lock file the child has done it.
    assert subprocess.run(argv, check=False).returncode == 0
    assert len(box.engine.containers) == 3
    lock.touch()
    assert subprocess.run(argv, check=False).returncode == 0

    assert list(box.engine.containers) == [container.id for container in foreign]
    assert ours.process is not None
    assert ours.process.poll() is not None
    assert not lock.exists()
    for container in foreign:
        client.remove_container(container.id, force=True)
    client.close()


def test_the_fake_engine_holds_to_the_shapes_of_the_api(box: Box) -> None:
    import docker
    from docker.errors import APIError

    client = docker.APIClient(base_url=box.engine.url, version="auto")
    with pytest.raises(APIError, match="unknown field"):
        client.create_container_from_config({"Image": "tool:latest", "Privileged": True})
    mount = docker.types.Mount("/data", "/no/such/folder", type="bind")
    with pytest.raises(APIError, match="source path does not exist"):
        client.create_container("tool:latest", host_config=client.create_host_config(mounts=[mount]))
    with pytest.raises(APIError, match="No such image"):
        client.create_container("other:latest")
    made = client.create_container("tool:latest", ["sleep", "3600"], name="one")["Id"]
    with pytest.raises(APIError, match="Conflict"):
        client.create_container("tool:latest", ["true"], name="one")
    with pytest.raises(APIError, match="is not running"):
        client.kill(made)
    client.start(made)
    with pytest.raises(APIError, match="cannot remove a running container"):
        client.remove_container(made)
    client.kill(made, signal="SIGKILL")
    assert client.wait(made) == {"StatusCode": 137}
    client.remove_container(made)
    with pytest.raises(APIError, match="No such container"):
        client.start(made)
    client.close()
    eventually(lambda: not box.engine.containers, what="an engine without containers")
