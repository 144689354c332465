"""Offline: no child opens a connection to another machine, and what is missing is said at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit
from gpuflow.worker.child_environment import OFFLINE
from tests.fixtures.executor_child import ROOT, Child, Ended, request_json
from tests.support.fleet import TestFleet
from tests.support.waiting import patient

#: Put on PYTHONPATH: every connection to another machine is written down and refused.
GUARD = """
import socket, os
_connect, _connect_ex = socket.socket.connect, socket.socket.connect_ex
def _checked(real):
    def connect(self, address):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith("127.") and address[0] != "::1":
            with open(os.environ["GUARD_FILE"], "a") as file:
                file.write(repr(address) + "\\n")
            raise OSError("refused by the test")
        return real(self, address)
    return connect
def _lookup(host, *args, **kwargs):
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        with open(os.environ["GUARD_FILE"], "a") as file:
            file.write(f"lookup {host!r}\\n")
        raise socket.gaierror("refused by the test")
    return _getaddrinfo(host, *args, **kwargs)
_getaddrinfo, socket.getaddrinfo = socket.getaddrinfo, _lookup
socket.socket.connect, socket.socket.connect_ex = _checked(_connect), _checked(_connect_ex)
"""


@pytest.fixture
def guarded(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment of a child that writes down what it connects to, and the file where that stands."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    seen = tmp_path / "connections.txt"
    seen.touch()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "guard"), str(ROOT)]),
        "GUARD_FILE": str(seen),
        "PIP_RETRIES": "0",
        "PIP_INDEX_URL": "https://index.invalid/simple",
        "HF_ENDPOINT": "http://hub.invalid",
        "HF_HOME": str(tmp_path / "hub"),
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), ""),
    }
    return environment, seen


MODEL = {"source": {"type": "preset", "identifier": "smollm2-135m-instruct"}}
HUB_MODEL = {"source": {"type": "huggingface", "identifier": "ana/no-such-model"}}
ITEMS = {"type": "list", "items": ["a"]}
TASKS = [
    pytest.param("inference", {"model": MODEL, "data": ITEMS}, id="model preset", marks=pytest.mark.ml),
    pytest.param("inference", {"model": MODEL, "data": {"type": "preset", "name": "chatterbot-english"}}, id="data"),
    pytest.param("inference", {"model": MODEL, "data": {"type": "jsonl", "url": "http://h.invalid/a.jsonl"}}, id="url"),
    pytest.param("inference", {"model": HUB_MODEL, "data": ITEMS}, id="hub", marks=pytest.mark.ml),
    pytest.param("sft", {"model": HUB_MODEL, "data": ITEMS}, id="training from the hub", marks=pytest.mark.ml),
]


def ended(task_type: str, spec: dict[str, Any], folder: Path, environment: dict[str, str]) -> Ended:
    (folder / "out").mkdir()
    child = Child(request_json(task_type, spec, folder / "out", cache_dir=str(folder / "cache")), environment)
    try:
        return child.end()
    finally:
        child.close()


@pytest.mark.parametrize(("task_type", "task"), TASKS)
def test_offline_opens_no_connection_and_says_what_is_missing(
    task_type: str, task: dict[str, Any], tmp_path: Path, guarded: tuple[dict[str, str], Path]
) -> None:
    environment, connections = guarded

    end = ended(task_type, task, tmp_path, {**environment, **OFFLINE})

    assert connections.read_text() == ""
    assert (end.error["type"], end.error["retryable"]) == ("Offline", False), end.log
    assert "gpuflow models pull" in end.error["message"]


@pytest.mark.ml
def test_without_offline_the_same_guard_sees_a_connection(tmp_path: Path, guarded: tuple[dict[str, str], Path]) -> None:
    environment, connections = guarded

    end = ended("inference", {"model": MODEL, "data": ITEMS}, tmp_path, environment)

    assert "index.invalid" in connections.read_text(), (end.error, end.log)
    assert end.error["type"] == "DownloadFailed"


def test_a_worker_that_is_offline_says_so_to_its_children(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env={"GPUFLOW_OFFLINE": "true", "HF_HUB_OFFLINE": "0"})

    seen = submit(fleet.echo(report_env=list(OFFLINE)), app=fleet.app).get(timeout=patient(30))["environment"]

    assert seen == OFFLINE
