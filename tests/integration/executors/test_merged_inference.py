"""Merged inference calls: one load, one batch for what is alike, and each answer what its call alone would have got."""

from __future__ import annotations

import io
import json
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.inference import Inference
from executors.merging import run_merged
from gpuflow.protocol import Emitter, Event, Request, parse_line

pytestmark = pytest.mark.ml

Merge = Callable[..., dict[str, Any]]


class Counts:
    """How often a model was loaded, and how many prompts each batch had."""

    def __init__(self) -> None:
        self.loads = 0
        self.batches: list[int] = []
        self.events: list[Event] = []


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    from executors.generation.text_generator import TextGenerator
    from executors.modeling import loading

    made = Counts()
    load_model, answer = loading.load_model, TextGenerator.answer

    def loaded(*arguments: Any) -> Any:
        made.loads += 1
        return load_model(*arguments)

    def answered(self: Any, texts: Any, *more: Any) -> Any:
        made.batches.append(len(texts))
        return answer(self, texts, *more)

    monkeypatch.setattr(loading, "load_model", loaded)
    monkeypatch.setattr(TextGenerator, "answer", answered)
    return made


@pytest.fixture
def merge(tmp_path: Path, tiny_model: Path, counts: Counts) -> Merge:
    """Run a merged request on the tiny model and return the results of its children."""

    def run(**children: dict[str, Any]) -> dict[str, Any]:
        common = {"taskType": "inference", "model": {"source": {"type": "local", "identifier": str(tiny_model)}}}
        listed = [{"id": name, "spec": spec} for name, spec in children.items()]
        stream = io.StringIO()
        request = Request(
            task_id="run",
            task_type="inference",
            spec={**common, "merge_children": listed},
            output_dir=str(tmp_path / f"out-{len(counts.batches)}"),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = run_merged(Inference(), request, Emitter(stream))
        counts.events = [parse_line(line) for line in stream.getvalue().splitlines()]
        for name, result in value["children"].items():
            if "items" in result:
                written = Path(request.output_dir) / "children" / name / "responses.json"
                assert json.loads(written.read_text()) == result
        return dict(value["children"])

    return run


def call(*prompts: str, **inference: Any) -> dict[str, Any]:
    return {"data": {"items": list(prompts)}, "inference": {"max_tokens": 6, "temperature": 0, **inference}}


def outputs(result: dict[str, Any]) -> list[str]:
    return [item["output"] for item in result["items"]]


def test_calls_that_are_alike_are_one_load_and_one_batch(merge: Merge, counts: Counts) -> None:
    calls = {
        "a": call("Hello Ana"),
        "b": call("Where is the red car?", "Dear Bo, the lamp"),
        "c": call("Hi", system_prompt="Answer in one word."),
    }

    together = merge(**calls)

    assert (counts.loads, counts.batches) == (1, [4])
    assert [item["index"] for item in together["b"]["items"]] == [0, 1]
    assert together["a"]["usage"]["completion_tokens"] >= 1
    assert together["a"]["engine"] == "transformers"
    for name, spec in calls.items():
        assert merge(**{name: spec})[name] == together[name]


def test_other_sampling_is_another_batch_of_the_same_model(merge: Merge, counts: Counts) -> None:
    together = merge(a=call("Hello"), b=call("Hello", max_tokens=2), c=call("Hi"))

    assert counts.loads == 1
    assert sorted(counts.batches) == [1, 2]
    assert together["b"]["items"][0]["usage"]["completion_tokens"] <= 2


def test_each_call_of_a_batch_has_its_own_structure(merge: Merge, counts: Counts) -> None:
    together = merge(
        a=call("Hello", structured_outputs={"regex": "[ab]{3}"}),
        b=call("Hello", "Hi", structured_outputs={"choice": ["yes", "no"]}),
        free=call("Hello"),
        wrong=call("Hello", structured_outputs={"json": {"type": "integer", "minimum": 5, "maximum": 1}}),
    )

    assert counts.batches == [4]
    assert re.fullmatch("[ab]{3}", outputs(together["a"])[0])
    assert set(outputs(together["b"])) <= {"yes", "no"}
    assert outputs(together["free"]) == outputs(merge(free=call("Hello"))["free"])
    assert "greater than maximum" in together["wrong"]["error"]["message"]


def test_a_seeded_call_gets_the_answer_that_it_would_get_alone(merge: Merge) -> None:
    seeded = call("Tell me", temperature=1.0, seed=7, max_tokens=8)

    together = merge(a=seeded, b=seeded, c=call("Tell me", temperature=1.0, seed=8, max_tokens=8))

    assert together["a"] == together["b"] == merge(a=seeded)["a"]
    assert outputs(together["c"]) != outputs(together["a"])


def test_one_bad_child_fails_alone(merge: Merge, counts: Counts) -> None:
    results = merge(
        good=call("Hello"),
        long=call("word " * 400),
        sampling=call("Hello", top_p=9),
        empty={"data": {"items": []}, "inference": {}},
        model={**call("Hello"), "model": {"source": {"type": "local", "identifier": "/there/is/no/model"}}},
        nearly=call("Hello " * 20, max_tokens=230),
    )

    assert {name for name, result in results.items() if "items" in result} == {"good", "nearly"}
    assert "shorten it" in results["long"]["error"]["message"]
    assert "top_p" in results["sampling"]["error"]["message"]
    assert results["model"]["error"]["retryable"] is False
    assert outputs(merge(good=call("Hello"))["good"]) == outputs(results["good"])


def test_a_long_prompt_cuts_no_other_answer(merge: Merge, counts: Counts) -> None:
    asked = {"max_tokens": 40, "ignore_eos": True}

    results = merge(
        a=call("Hello", "Hello " * 110, "Dear Bo", **asked),
        b=call("Hi", **asked),
        c=call("Hello", "Hello " * 110, "Dear Bo", **asked, temperature=1.0, seed=3),
    )

    for name in "abc":
        lengths = [item["usage"]["completion_tokens"] for item in results[name]["items"]]
        assert all((length == 40) is (number != 1) for number, length in enumerate(lengths))
    assert counts.batches == [1, 1, 2, 1, 1, 1]


def test_a_call_without_a_seed_does_not_repeat_after_a_seeded_one(merge: Merge) -> None:
    free = call("Tell me", temperature=1.0, max_tokens=8)
    seeded = call("Tell me", temperature=1.0, max_tokens=8, seed=7)

    found = [outputs(merge(a=seeded, b=free)["b"]) for _ in range(2)]

    assert found[0] != found[1]


def test_a_batch_that_fails_is_answered_child_by_child(
    merge: Merge, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executors.generation.text_generator import TextGenerator

    answer = TextGenerator.answer
    made: list[weakref.ref[Counts]] = []
    left: list[int] = []

    def fragile(self: Any, texts: Any, *more: Any) -> Any:
        left.append(sum(1 for one in made if one() is not None))
        tensor = Counts()
        made.append(weakref.ref(tensor))
        if len(texts) > 1 or "Bad" in texts[0].text:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return answer(self, texts, *more)

    monkeypatch.setattr(TextGenerator, "answer", fragile)

    results = merge(a=call("Hello"), b=call("Bad"), c=call("Hi"))

    assert counts.loads == 1
    assert left[:2] == [0, 0]  # nothing of the batch is in memory when the first child is tried again
    assert outputs(results["a"]) and outputs(results["c"])
    assert (results["b"]["error"]["type"], results["b"]["error"]["retryable"]) == ("OutOfMemory", True)


def test_streamed_text_says_whose_it_is(merge: Merge, counts: Counts) -> None:
    results = merge(a=call("Hello", stream=True), b=call("Hi"))

    told = [event.data for event in counts.events if event.name == "text_delta"]
    assert {one["child"] for one in told} == {"a"}
    assert "".join(one["delta"] for one in told) == outputs(results["a"])[0]
    assert counts.batches == [2]
