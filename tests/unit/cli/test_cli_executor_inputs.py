"""The inputs of a request that is run by itself, and of the callers of a merged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuflow.cli.executor_inputs import localized
from gpuflow.errors import ArtifactError
from gpuflow.protocol import Request
from gpuflow.settings import Settings


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    return tmp_path / "weights"


def request_of(spec: dict[str, Any], **fields: Any) -> Request:
    return Request(task_id="t", task_type="echo", spec={"taskType": "echo", **spec}, output_dir="out", **fields)


def load(path: object) -> dict[str, Any]:
    return {"checkpoint": {"load": {"path": str(path)}}}


def test_the_checkpoint_is_a_folder_here(weights: Path) -> None:
    request = localized(request_of(load(weights)), Settings.load(env={}))

    assert request.checkpoint_path == str(weights)


def test_one_that_is_not_there_is_said_unless_the_request_has_its_own(tmp_path: Path) -> None:
    spec = load(tmp_path / "nothing")

    with pytest.raises(ArtifactError, match="nothing is not on this machine"):
        localized(request_of(spec), Settings.load(env={}))

    own = localized(request_of(spec, checkpoint_path="/given"), Settings.load(env={}))
    assert (own.checkpoint_path, own.spec["checkpoint"]) == ("/given", spec["checkpoint"])


def test_each_caller_of_a_merged_request_has_inputs_of_its_own(weights: Path, tmp_path: Path) -> None:
    children = [
        {"id": "a", "spec": load(weights)},
        {"id": "b", "spec": load(tmp_path / "nothing")},
        {"id": "c", "spec": {"checkpoint": "no section"}},
        {"id": "d", "spec": {"env": {"NAME": "value"}}},
        "no child",
    ]

    request = localized(request_of({"merge_children": children}), Settings.load(env={}))

    a, b, c, d, last = request.spec["merge_children"]
    assert a["checkpoint_path"] == str(weights)
    assert b["error"]["type"] == "ArtifactError"
    assert (c, last) == (children[2], "no child")
    assert "checkpoint_path" not in d
    assert request.spec["env"] == {"NAME": "value"}


def test_what_is_no_list_of_callers_is_left_to_the_child() -> None:
    request = localized(request_of({"merge_children": "x"}), Settings.load(env={}))

    assert request.spec["merge_children"] == "x"
