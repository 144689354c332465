"""What a session makes of its opening and of requests: references, weights, inputs, sections without effect."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.cache import Holds
from executors.cache import unused as unused_entry
from executors.sessions.lines import Open
from executors.sessions.requests import opened, read_request
from executors.sessions.unused import unused

OPENING = Open(spec={"model": {"source": {"identifier": "org/model", "revision": None}}}, engine="vllm")


def request_of(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"task_id": "t", "task_type": "inference", "spec": {}, "output_dir": str(folder / "out"), **fields}


def test_a_request_is_read_with_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "Ana")
    spec = {"env": {"GREETING": "Hello ${env:NAME}"}, "data": {"items": ["${env:GREETING}"]}}

    request = read_request(request_of(tmp_path, spec=spec), OPENING, Holds())

    assert request.spec["data"]["items"] == ["Hello Ana"]
    assert (tmp_path / "out").is_dir()
    with pytest.raises(ExecutorError, match="GREETING is not set"):
        read_request(request_of(tmp_path, spec={"data": spec["data"]}), OPENING, Holds())


@pytest.mark.parametrize(
    ("fields", "says", "retryable"),
    [
        ({"spec": []}, "spec must be an object", False),
        ({"output_dir": ""}, "output_dir", False),
        ({"task_type": "embedding"}, "embedding", True),
        ({"spec": {"model": {"source": {"identifier": "org/other"}}}}, "org/other", True),
    ],
)
def test_a_request_for_another_session_is_refused_and_may_be_tried_there(
    tmp_path: Path, fields: dict[str, Any], says: str, retryable: bool
) -> None:
    with pytest.raises(ExecutorError, match=says) as raised:
        read_request(request_of(tmp_path, **fields), OPENING, Holds())
    assert (raised.value.type, raised.value.retryable) == ("BadRequest", retryable)


def weights(folder: Path, name: str, file: str = "config.json") -> str:
    (folder / name).mkdir()
    (folder / name / file).write_text("{}")
    return str(folder / name)


def test_weights_of_a_checkpoint_are_served_to_who_begins_from_them_alone(tmp_path: Path) -> None:
    whole, other = weights(tmp_path, "whole"), weights(tmp_path, "other")
    lora = weights(tmp_path, "lora", "adapter_config.json")
    of_whole = replace(OPENING, checkpoint_path=whole)

    assert read_request(request_of(tmp_path, checkpoint_path=whole), of_whole, Holds()).checkpoint_path == whole
    for asked, opening in (
        (None, of_whole),
        (other, of_whole),
        (lora, of_whole),
        (whole, OPENING),
        (whole, replace(OPENING, checkpoint_path=lora)),
    ):
        with pytest.raises(ExecutorError, match="begins from") as raised:
            read_request(request_of(tmp_path, checkpoint_path=asked), opening, Holds())
        assert raised.value.retryable
    for opening in (OPENING, replace(OPENING, checkpoint_path=lora)):
        for asked in (None, lora):
            read_request(request_of(tmp_path, checkpoint_path=asked), opening, Holds())


def test_the_children_of_a_merged_request_say_for_themselves_what_they_begin_from(tmp_path: Path) -> None:
    spec = {"merge_children": [{"id": "a", "spec": {}, "checkpoint_path": "/elsewhere"}]}
    opening = replace(OPENING, checkpoint_path=weights(tmp_path, "whole"))

    assert read_request(request_of(tmp_path, spec=spec), opening, Holds()).spec == spec


def test_an_opening_has_its_references_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ORG": "acme", "PLAIN": "set by the worker", "MODEL": ""}.items():
        monkeypatch.setenv(name, value)
    source = {"identifier": "${env:MODEL}", "revision": "$${env:LITERAL}"}
    spec = {"env": {"MODEL": "${env:ORG}/model", "PLAIN": "other"}, "model": {"source": source}}

    opening = opened(replace(OPENING, spec=spec))

    assert opening.spec["model"]["source"] == {"identifier": "acme/model", "revision": "${env:LITERAL}"}
    assert (os.environ["MODEL"], os.environ["PLAIN"]) == ("acme/model", "set by the worker")
    read_request(request_of(tmp_path, spec=spec), opening, Holds())
    with pytest.raises(ExecutorError, match="NOT_THERE is not set") as raised:
        opened(replace(OPENING, spec={"model": {"source": {"identifier": "${env:NOT_THERE}"}}}))
    assert raised.value.type == "BadInput"


def test_inputs_of_a_request_are_held_as_long_as_it_runs(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "references" / "rows"
    entry.mkdir(parents=True)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        (entry.parent / f"rows-{number}").mkdir()
        holds = Holds()
        data = {"data": {"path": str(entry.parent / f"rows-{number}")}}
        read_request(request_of(tmp_path, spec=data, cache_dir=str(tmp_path / "cache")), OPENING, holds)
        with unused_entry(tmp_path / "cache", f"references-rows-{number}") as free:
            assert not free
        holds.release()
        with unused_entry(tmp_path / "cache", f"references-rows-{number}") as free:
            assert free
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


# -- sections that an engine does not read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "engine", "loaded", "says"),
    [
        ({"vllm": {"a": 1}}, "transformers", None, ["model.vllm is not used"]),
        ({"transformers": {"a": 1}}, "vllm", None, ["model.transformers is not used"]),
        ({"vllm": {"a": 1}, "transformers": {}}, "vllm", None, []),
        ({"vllm": {"a": 1}}, "vllm", {"vllm": {"a": 1}}, []),
        ({"vllm": {"a": 1}}, "vllm", {"vllm": {"a": 2}}, ["model.vllm of this request is not used"]),
        ({"transformers": {"a": 1}}, "transformers", {}, ["model.transformers of this request is not used"]),
        (None, "vllm", {"vllm": {"a": 2}}, []),
    ],
)
def test_sections_that_have_no_effect_are_told_of(model: Any, engine: str, loaded: Any, says: list[str]) -> None:
    opened_with = None if loaded is None else {"model": loaded}
    found = unused({"model": model}, engine=engine, task_type="inference", loaded=opened_with)
    assert [message[: len(begins)] for message, begins in zip(found, says, strict=True)] == says


def test_sampling_of_an_embedding_is_told_of() -> None:
    spec = {"inference": {"temperature": 1}}
    assert [one[:21] for one in unused(spec, engine="vllm", task_type="embedding")] == ["inference is not used"]
    assert unused(spec, engine="vllm", task_type="inference") == []
