"""Where a task may send what its trackers write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executors import task_access
from executors.training.tracking import prepare_tracking
from gpuflow.errors import NotAllowed
from gpuflow.policy.hosts import Hosts
from gpuflow.protocol import Request
from tests.fixtures.executor_child import request_json


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_access, "_hosts", Hosts())
    monkeypatch.setattr(os, "environ", dict(os.environ))


def asks(folder: Path, tracker: str, **env: str) -> Request:
    spec = {"taskType": "sft", "training": {"report_to": tracker}, "env": env}
    os.environ.update(env)
    return Request.from_json(request_json("sft", spec, folder))


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("MLFLOW_TRACKING_URI", "file:///home/worker/runs"),
        ("MLFLOW_TRACKING_URI", "/home/worker/runs"),
        ("MLFLOW_TRACKING_URI", "sqlite:////home/worker/runs.db"),
        ("MLFLOW_TRACKING_URI", "http://127.0.0.1:6379"),
        ("MLFLOW_TRACKING_URI", "http://[::ffff:10.0.0.1]/"),
        ("MLFLOW_TRACKING_URI", "http://127.0.0.1:port"),
        ("MLFLOW_REGISTRY_URI", "http://169.254.169.254/latest"),
        ("WANDB_BASE_URL", "http://localhost:8080"),
    ],
)
def test_a_folder_or_a_private_host_is_refused(tmp_path: Path, name: str, url: str) -> None:
    with pytest.raises(NotAllowed):
        prepare_tracking(asks(tmp_path, "mlflow" if name.startswith("MLFLOW") else "wandb", **{name: url}))


def test_a_public_server_and_what_the_operator_has_set_are_taken(tmp_path: Path) -> None:
    prepare_tracking(asks(tmp_path, "mlflow", MLFLOW_TRACKING_URI="https://8.8.8.8/mlflow"))
    request = asks(tmp_path, "mlflow")
    os.environ["MLFLOW_TRACKING_URI"] = "file:///srv/runs"

    prepare_tracking(request)

    assert os.environ["MLFLOW_TRACKING_URI"] == "file:///srv/runs"
