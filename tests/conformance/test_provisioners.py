"""What every provisioner promises, shown of each: processes of this machine, a user's command, EC2 instances."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.scaling.provisioners import ContainerImage, Provisioner, ProvisionerError, Wanted
from gpuflow.scaling.provisioners.aws import Ec2Machines
from gpuflow.scaling.provisioners.command import CommandProvisioner
from gpuflow.scaling.provisioners.containers import Containers
from gpuflow.scaling.provisioners.local import LocalProcesses
from gpuflow.settings import Settings
from tests.support.ec2 import Ec2Server
from tests.support.scripted_engine import scripted_engine
from tests.support.waiting import eventually

#: A provider in one file: its machines are files of a folder.
PROVIDER = """
    import json, pathlib, sys
    asked, folder = json.load(sys.stdin), pathlib.Path(sys.argv[1])
    assert asked["schema"] == 1 and asked["fleet"] == "gpuflow"
    if asked["action"] == "launch":
        (folder / "ended" / asked["machine"]["id"]).exists() or (folder / asked["machine"]["id"]).write_text(
            asked["machine"]["family"])
    elif asked["action"] == "terminate":
        (folder / asked["machine"]["id"]).unlink(missing_ok=True)
        (folder / "ended" / asked["machine"]["id"]).touch()
    else:
        files = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"]
        print(json.dumps({"machines": [{"id": path.name, "family": path.read_text()} for path in files]}))
"""


class Idle(LocalProcesses):
    """Processes that do nothing, in place of workers, which take seconds to start."""

    def _argv(self, wanted: Wanted) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Idle]:
    made = Idle(Settings(state_dir=tmp_path), "redis://127.0.0.1:1/0", "gpuflow")
    yield made
    for child in made._children:
        child.kill()
        child.wait()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scripted `docker` in PATH; the folder of its containers."""
    place = scripted_engine(tmp_path)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    return place / "state"


def containers(tag: str = "gpuflow", **image: Any) -> Containers:
    settings = Settings(key_prefix="team:")
    return Containers(ContainerImage(image="ours:1", **image), settings, "redis://:secret@broker:1/0", tag)


@pytest.fixture(params=["local", "command", "aws", "container"])
def provisioner(request: pytest.FixtureRequest, tmp_path: Path) -> Provisioner:
    if request.param == "container":
        request.getfixturevalue("engine")
        return containers()
    if request.param == "aws":
        there: Ec2Server = request.getfixturevalue("ec2")
        return there.machines("gpuflow")
    if request.param == "local":
        made: Provisioner = request.getfixturevalue("idle")
        return made
    (tmp_path / "ended").mkdir()
    program = tmp_path / "provider.py"
    program.write_text(textwrap.dedent(PROVIDER))
    return CommandProvisioner([sys.executable, str(program), str(tmp_path)], tag="gpuflow")


def test_a_machine_comes_and_goes(provisioner: Provisioner) -> None:
    assert provisioner.machines() == {}
    provisioner.launch(Wanted(id="gpu-1", family="gpu"))
    provisioner.launch(Wanted(id="cpu-1", family="cpu", spot=True, worker_options=("--max-jobs", "1")))
    assert provisioner.machines() == {"gpu-1": "gpu", "cpu-1": "cpu"}
    provisioner.terminate("gpu-1")
    assert provisioner.machines() == {"cpu-1": "cpu"}


def test_each_call_may_be_repeated(provisioner: Provisioner) -> None:
    provisioner.terminate("gpu-1")
    provisioner.launch(Wanted(id="gpu-2", family="gpu"))
    provisioner.launch(Wanted(id="gpu-2", family="gpu"))
    assert provisioner.machines() == {"gpu-2": "gpu"}
    provisioner.terminate("gpu-2")
    provisioner.terminate("gpu-2")
    assert provisioner.machines() == {}


def test_a_launch_that_comes_after_the_end_launches_nothing(provisioner: Provisioner) -> None:
    provisioner.launch(Wanted(id="gpu-1", family="gpu"))
    provisioner.terminate("gpu-1")
    provisioner.launch(Wanted(id="gpu-1", family="gpu"))
    assert provisioner.machines() == {}
    provisioner.terminate("gpu-9")  # before it was ever launched
    provisioner.launch(Wanted(id="gpu-9", family="gpu"))
    assert provisioner.machines() == {}


def test_another_object_sees_the_same_machines(provisioner: Provisioner, tmp_path: Path, ec2: Ec2Server) -> None:
    provisioner.launch(Wanted(id="gpu-1", family="gpu"))
    other: Provisioner
    if isinstance(provisioner, Idle):
        other = Idle(Settings(state_dir=tmp_path), "redis://127.0.0.1:1/0", "gpuflow")
    elif isinstance(provisioner, Ec2Machines):
        other = ec2.machines("gpuflow")
    elif isinstance(provisioner, Containers):
        other = containers()
    else:
        other = CommandProvisioner([sys.executable, str(tmp_path / "provider.py"), str(tmp_path)], tag="gpuflow")
    assert other.machines() == {"gpu-1": "gpu"}
    other.launch(Wanted(id="gpu-1", family="gpu"))
    other.terminate("gpu-1")
    assert provisioner.machines() == {}


def test_a_container_gets_the_broker_by_its_environment_and_no_argument(engine: Path) -> None:
    machines = containers(options=("--gpus", "all"), environment=("HF_HOME",))
    machines.launch(Wanted(id="gpu-1", family="gpu", worker_options=("--max-jobs", "1")))
    words, environment = json.loads((engine / "calls").read_text().splitlines()[0])
    assert "secret" not in " ".join(words)
    assert environment["REDIS_URL"].endswith("secret@broker:1/0") and environment["GPUFLOW_KEY_PREFIX"] == "team:"
    assert [words[n + 1] for n, word in enumerate(words) if word == "--env"] == [
        "REDIS_URL",
        "GPUFLOW_KEY_PREFIX",
        "HF_HOME",
    ]
    assert words[-11:] == [
        *("--gpus", "all", "ours:1", "celery", "-A", "gpuflow", "worker", "--name", "gpu-1", "--max-jobs", "1"),
    ]


def test_two_fleets_of_one_engine_leave_each_other_alone(engine: Path) -> None:
    first, second = containers("gpuflow-a"), containers("gpuflow-b")
    first.launch(Wanted(id="gpu-1", family="gpu"))
    assert second.machines() == {}
    second.terminate("gpu-1")
    assert first.machines() == {"gpu-1": "gpu"} and first.unknown() == []
    (seen,) = second.unknown()
    assert (seen.id, seen.fleet) == ("gpu-1", "gpuflow-a")
    assert re.fullmatch(r"docker stop [0-9a-f]{12}  # on \S+", seen.end_command())


def test_what_is_left_of_containers_is_bounded(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.scaling.provisioners.containers._KEPT", 2)
    machines = containers()
    for number in range(4):
        machines.launch(Wanted(id=f"gpu-{number}", family="gpu"))
        machines.terminate(f"gpu-{number}")
    left = [json.loads(path.read_text())["name"] for path in engine.glob("*.json")]
    assert sorted(left) == ["gpuflow.gpuflow.gpu-2", "gpuflow.gpuflow.gpu-3"]


def test_an_engine_that_fails_says_why(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine / "broken").touch()
    with pytest.raises(ProvisionerError, match="'docker' failed to list: Cannot connect to the Docker daemon"):
        containers().machines()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProvisionerError, match="cannot be started"):
        containers().machines()


# -- of each by itself -----------------------------------------------------------------------------------------------


def test_two_fleets_of_one_state_folder_leave_each_other_alone(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    first, second = (Idle(settings, "redis://127.0.0.1:1/0", tag) for tag in ("gpuflow-a", "gpuflow-b"))
    try:
        first.launch(Wanted(id="gpu-1", family="gpu"))
        assert second.machines() == {}
        second.terminate("gpu-1")
        assert first.machines() == {"gpu-1": "gpu"} and first.unknown() == []
        (seen,) = second.unknown()
        assert (seen.id, seen.family, seen.fleet) == ("gpu-1", "gpu", "gpuflow-a")
        assert seen.pid == first._children[0].pid and seen.end_command().startswith(f"kill {seen.pid}  # on ")
        second.launch(Wanted(id="gpu-2", family="gpu"))
        assert first.machines() == {"gpu-1": "gpu"} and second.machines() == {"gpu-2": "gpu"}
    finally:
        first.terminate("gpu-1")
        second.terminate("gpu-2")
    assert first.unknown() == second.unknown() == []


def test_machines_from_before_the_tag_are_taken_over_where_the_broker_knows_them(tmp_path: Path) -> None:
    settings, url = Settings(state_dir=tmp_path), "redis://127.0.0.1:1/0"
    before = Idle(settings, url, "")  # their files lay in the folder itself
    ids = ("gpu-1", "gpu-2", "gpu-theirs")
    for machine_id in ids:
        before.launch(Wanted(id=machine_id, family="gpu"))
    before.terminate("gpu-2")
    try:
        made = Idle(settings, url, "gpuflow-a", recorded=["gpu-1", "gpu-2", "gpu-9", "../evil"])
        assert made.machines() == {"gpu-1": "gpu"}
        assert [one.id for one in made.unknown()] == ["gpu-theirs"]
        made.launch(Wanted(id="gpu-1", family="gpu"))
        made.launch(Wanted(id="gpu-2", family="gpu"))
        assert made._children == [], "the one is there, the other was ended"
        assert Idle(settings, url, "gpuflow-a", recorded=["gpu-1"]).machines() == {"gpu-1": "gpu"}
        made.terminate("gpu-1")
        eventually(lambda: before._children[0].poll() is not None)
    finally:
        for child in before._children:
            child.kill()
            child.wait()


def test_a_process_that_died_is_no_machine(idle: Idle, tmp_path: Path) -> None:
    idle.launch(Wanted(id="gpu-1", family="gpu"))
    psutil.Process(json.loads((tmp_path / "machines" / "gpuflow" / "gpu-1.json").read_text())["pid"]).kill()
    eventually(lambda: idle.machines() == {})


def test_a_process_that_has_taken_the_number_is_left_alone(idle: Idle, tmp_path: Path) -> None:
    idle.launch(Wanted(id="gpu-1", family="gpu"))
    path = tmp_path / "machines" / "gpuflow" / "gpu-1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "created": record["created"] - 100}))
    assert idle.machines() == {}
    idle.terminate("gpu-1")
    process = psutil.Process(record["pid"])
    assert process.is_running()
    process.kill()
    eventually(lambda: idle.machines() == {} and not process.is_running())


@pytest.mark.parametrize("machine_id", ["", "../evil", "a/b", "a b"])
def test_a_name_that_is_no_file_is_refused(machine_id: str, tmp_path: Path) -> None:
    with pytest.raises(ProvisionerError, match="cannot name a machine"):
        Idle(Settings(state_dir=tmp_path), "redis://127.0.0.1:1/0", "gpuflow").launch(
            Wanted(id=machine_id, family="gpu")
        )


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import sys; sys.exit('no quota')", "exit code 1: no quota"),
        ("print('hello')", "no JSON object"),
        ("print('[]')", "no JSON object"),
        ("print('{}')", "machines"),
        ("print('{\"machines\": [1]}')", "machines"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_command_that_fails_says_why(program: str, cause: str) -> None:
    made = CommandProvisioner([sys.executable, "-c", program], tag="gpuflow", timeout_seconds=1)
    with pytest.raises(ProvisionerError, match=cause):
        made.machines()


def test_a_command_whose_child_keeps_the_pipes_is_not_waited_for(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'], start_new_session=True)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(one.pid))\n"
        "time.sleep(60)\n"
    )
    made = CommandProvisioner([sys.executable, "-c", program], tag="gpuflow", timeout_seconds=3)
    try:
        with pytest.raises(ProvisionerError, match="did not end within 3 s"):
            made.machines()
        assert psutil.Process(int(child.read_text())).status() != psutil.STATUS_ZOMBIE, "it was not waited for"
    finally:
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process(int(child.read_text())).kill()


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ProvisionerError, match="cannot be started"):
        CommandProvisioner(["/no/such/program"], tag="gpuflow").launch(Wanted(id="a", family="b"))
