"""Merged requests: several callers in one child, each with its own files, events and end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.merging import MergedChild, joined
from gpuflow.protocol import Emitter, Request
from tests.fixtures.executor_child import Child, Ended


@pytest.fixture
def merged(start: Callable[..., Child]) -> Callable[..., Ended]:
    def run(children: Any, **common: Any) -> Ended:
        return start("echo", {"taskType": "echo", **common, "merge_children": children}).end()

    return run


def call(name: str, **spec: Any) -> dict[str, Any]:
    return {"id": name, "spec": spec}


def fail(**how: Any) -> dict[str, Any]:
    return {"fail": {"type": "Bad", "message": "no luck", **how}}


def test_each_child_has_its_own_result_files_and_events(merged: Callable[..., Ended], tmp_path: Path) -> None:
    ended = merged([call("a", data={"items": [1]}), call("b", data={"items": [2]})], echo={"steps": 2})

    children = ended.result["children"]
    assert {name: [item["output"] for item in one["items"]] for name, one in children.items()} == {"a": [1], "b": [2]}
    assert json.loads((tmp_path / "out/children/b/responses.json").read_text())["items"][0]["output"] == 2
    assert json.loads((tmp_path / "out/responses.json").read_text()) == {"children": children}
    assert [one["path"] for one in ended.named("artifact")] == [
        "children/a/responses.json",
        "children/b/responses.json",
        "responses.json",
    ]
    own = [(one["child"], one["current"]) for one in ended.named("progress") if "child" in one]
    assert own == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    whole = [(one["current"], one["total"]) for one in ended.named("progress") if "child" not in one]
    assert whole == [(0, 2), (1, 2), (2, 2)]


def test_a_childs_spec_is_laid_over_the_common_one(merged: Callable[..., Ended]) -> None:
    ended = merged([call("a"), call("b", echo={"output": "own"})], echo={"output": "common"})

    assert {name: one["output"] for name, one in ended.result["children"].items()} == {"a": "common", "b": "own"}


def test_one_bad_child_fails_alone(merged: Callable[..., Ended]) -> None:
    ended = merged(
        [call("a"), call("b", echo=fail(retryable=True)), call("c", env={"X": "${env:NOT_THERE}"}), {"id": "d"}]
    )

    children = ended.result["children"]
    assert "items" in children["a"]
    assert children["b"] == {"error": {"type": "Bad", "message": "no luck", "retryable": True}}
    assert children["d"]["error"]["type"] == "BadInput"


def test_a_reference_to_the_environment_that_is_missing_fails_its_child_alone(merged: Callable[..., Ended]) -> None:
    children = merged([call("a"), call("b", data={"items": ["${env:NOT_THERE}"]})]).result["children"]

    assert "items" in children["a"]
    assert "NOT_THERE" in children["b"]["error"]["message"]


def test_when_another_attempt_may_help_every_child_the_whole_is_tried_again(merged: Callable[..., Ended]) -> None:
    ended = merged([call("a", echo=fail(retryable=True)), call("b", echo=fail(retryable=True))])

    assert ended.error == {"type": "Bad", "message": "no luck", "retryable": True}


def test_when_no_attempt_can_help_each_child_has_its_error(merged: Callable[..., Ended]) -> None:
    children = merged([call("a", echo=fail()), call("b", echo=fail(retryable=True))]).result["children"]

    assert [children[name]["error"]["retryable"] for name in "ab"] == [False, True]


def test_a_value_that_is_empty_or_has_a_field_error_is_no_failure(tmp_path: Path) -> None:
    children = [MergedChild(id=name, request=_request(tmp_path)) for name in "abc"]
    stream = io.StringIO()

    value = joined(_request(tmp_path), children, {"a": {}, "b": {"error": 0.1}}, Emitter(stream))

    assert value["children"]["a"] == {}
    assert value["children"]["b"] == {"error": 0.1}
    assert value["children"]["c"]["error"]["type"] == "NoResult"
    alone = joined(_request(tmp_path), children[1:2], {"b": {"error": {"rate": 0.1}}}, Emitter(stream))
    assert alone == {"children": {"b": {"error": {"rate": 0.1}}}}


def _request(folder: Path) -> Request:
    return Request(task_id="t", task_type="echo", spec={}, output_dir=str(folder / "out"))


@pytest.mark.parametrize(
    "children", [[], "ab", {"a": 1}, [{"spec": {}}], [call("../up")], [call("a"), call("a")], [1]], ids=str
)
def test_a_list_that_is_none_is_bad_input(merged: Callable[..., Ended], children: Any) -> None:
    error = merged(children).error

    assert error["type"] == "BadInput"
    assert "merge_children" in error["message"]


def test_a_cancel_ends_all_children(start: Callable[..., Child]) -> None:
    spec = {"taskType": "echo", "merge_children": [call("a", echo={"sleep_seconds": 60, "steps": 600}), call("b")]}
    child = start("echo", spec)
    child.until("progress", child="a")

    child.signal()

    assert child.end().finish["status"] == "cancelled"
