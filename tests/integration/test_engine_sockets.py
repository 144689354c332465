"""The folder of an engine's sockets goes with the engine, however that or its worker ends; without vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.worker import engine_sockets
from gpuflow.worker.child import Child
from gpuflow.worker.child_user import ChildUser
from gpuflow.worker.confinement import UNCONFINED, Confinement
from gpuflow.worker.engine_sockets import VARIABLE, own_sockets
from tests.support.waiting import eventually

VLLM = {"GPUFLOW_ENGINE": "vllm", "PATH": os.environ["PATH"]}
#: What vLLM does: sockets of random names, which it removes at a clean end alone.
PROGRAM = """
import os, signal, socket, uuid
for _ in range(3):
    socket.socket(socket.AF_UNIX).bind(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], str(uuid.uuid4())))
print("bound", flush=True)
signal.pause()
"""
#: A worker that starts such a child, says so, and waits to be killed.
WORKER = f"""
import os, signal, sys
from pathlib import Path
from gpuflow.worker.child import Child
from gpuflow.worker.confinement import UNCONFINED
from gpuflow.worker.engine_sockets import own_sockets
with own_sockets({VLLM!r}, (), UNCONFINED) as started:
    child = Child([sys.executable, "-c", {PROGRAM!r}], request="", environment=started.environment, cwd=Path("/"),
                  at_end=started.at_end)
for _, line in child.read(0.1):
    if line == b"bound":
        print("bound", flush=True)
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name, as that of temporary files is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv(VARIABLE, folder)
        yield Path(folder)


def test_a_child_that_is_killed_leaves_no_socket(base: Path) -> None:
    with own_sockets(VLLM, (), UNCONFINED) as started:
        child = Child(
            [sys.executable, "-c", PROGRAM],
            request="",
            environment=started.environment,
            cwd=base,
            at_end=started.at_end,
        )
    for _, line in child.read(0.1):
        if line == b"bound":
            assert len([path for path in base.rglob("*") if path.is_socket()]) == 3
            child.kill()

    assert child.wait().signal == signal.SIGKILL
    assert list(base.iterdir()) == []


def test_a_worker_that_is_killed_leaves_no_socket(base: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"bound\n"
        assert len([path for path in base.rglob("*") if path.is_socket()]) == 3
        worker.kill()

    eventually(lambda: not list(base.iterdir()), what="the end of the folder")


def test_a_child_that_is_not_started_leaves_no_folder(base: Path) -> None:
    with pytest.raises(OSError, match="no shim"), own_sockets(VLLM, (), UNCONFINED):
        raise OSError("no shim")

    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "at_end", "confinement"),
    [
        ({"GPUFLOW_ENGINE": "transformers"}, (), UNCONFINED),
        ({}, (), UNCONFINED),
        (VLLM, ("/usr/bin/docker", "rm"), UNCONFINED),
        (VLLM, (), Confinement(sandbox=("bwrap",))),
    ],
    ids=["another engine", "no engine", "a container", "a sandbox"],
)
def test_who_has_no_such_folder(base: Path, environment, at_end, confinement) -> None:  # type: ignore[no-untyped-def]
    with own_sockets(environment, at_end, confinement) as started:
        assert (started.environment, started.at_end) == (environment, at_end)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("long", [False, True])
def test_the_path_of_a_socket_is_short_enough(base: Path, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    place = base / ("x" * 40 if long else "x" * (engine_sockets._MOST_BYTES - len(str(base)) - 1))
    place.mkdir()
    monkeypatch.setenv(VARIABLE, str(place))

    with own_sockets(VLLM, (), UNCONFINED) as started:
        folder = Path(started.environment[VARIABLE])
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / str(uuid.uuid4())))
        assert (folder.parent == place) is not long
        assert folder.stat().st_mode & 0o077 == 0
    subprocess.run(started.at_end, check=True)
    assert not folder.exists()


def test_the_folder_is_of_the_user_of_the_child(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append((str(path), uid, gid)))
    user = ChildUser(name="tasks", uid=4242, gid=4343, groups=(), home="/")

    with own_sockets(VLLM, (), Confinement(user=user)) as started:
        assert given == [(started.environment[VARIABLE], 4242, 4343)]
