"""Fields that others of the same task make useless, or impossible, are told: none is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from executors.data import columns
from gpuflow.errors import InvalidTemplate
from gpuflow.spec import canonical, parse
from gpuflow.spec.combinations import _OF_DESTINATIONS
from gpuflow.spec.data_fields import _OF_TYPES, FORMS, TAKE_TOOLS
from gpuflow.spec.models_data import Data
from gpuflow.spec.models_kinds import Destination, Model
from gpuflow.spec.sections import PARTS_USED_BY

SOURCE = {"source": {"identifier": "a/b"}}
ROWS = {"items": [{"prompt": "a", "completion": "b"}]}
PAIRS = {"preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}
TASKS: dict[str, dict[str, Any]] = {
    "echo": {},
    "inference": {"model": SOURCE, "data": {"items": ["a"]}},
    "embedding": {"model": SOURCE, "data": {"items": ["a"]}},
    "rag": {"query": "q", "embedding": {"model": "m"}, "search": {"documents": ["a"]}},
    "sft": {"model": SOURCE, "data": ROWS},
    "lora_sft": {"model": SOURCE, "data": ROWS},
    "dpo": {"model": SOURCE, "data": PAIRS},
    "ppo": {"model": SOURCE, "data": {"prompts": ["a"]}, "reward_model": {"type": "sentiment"}},
    "command": {"command": "ls"},
    "container": {"container": {"image": "a:1"}},
    "acme.words": {},
}
FILE = {"path": "/a.jsonl"}
LOCAL = {"type": "local", "identifier": "/m"}
PRESET = {"type": "preset", "identifier": "smollm2-135m-instruct"}


def asked(task_type: str, version: str = "gpuflow/v1", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "spec": {"taskType": task_type, **TASKS[task_type], **fields}}


def mistakes(source: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidTemplate) as caught:
        parse(source)
    return {one.path.removeprefix("spec."): one.message for one in caught.value.mistakes}


def told(source: dict[str, Any]) -> dict[str, str]:
    return {one.path.removeprefix("spec."): one.message for one in parse(source).warnings}


#: Task type, its fields, the path that is wrong, words of the cause or the mend.
USELESS: list[tuple[str, dict[str, Any], str, str]] = [
    ("sft", {"model": {**SOURCE, "vllm": {"max_model_len": 9}}}, "model.vllm", "belongs to embedding or inference"),
    ("rag", {"model": {**SOURCE, "vllm": {"max_model_len": 9}}}, "model.vllm", "not used by taskType rag"),
    ("container", {"model": {**SOURCE, "adapters": [{"path": "/x"}]}}, "model.adapters", "not used by taskType"),
    ("command", {"model": SOURCE}, "model", "not used by taskType command"),
    ("command", {"data": {"items": ["a"]}}, "data", "not used by taskType command"),
    ("container", {"data": {"items": ["a"]}}, "data", "not used by taskType container"),
    ("inference", {"data": {"items": ["a"], "split": "train"}}, "data.split", "data of type dataset"),
    ("inference", {"data": {"items": ["a"], "name": "x"}}, "data.name", "data of type dataset or preset"),
    ("inference", {"data": {**FILE, "revision": "x"}}, "data.revision", "data of type dataset"),
    ("inference", {"data": {**FILE, "items": ["a"]}}, "data.path", "beside items in data of type list"),
    ("inference", {"data": {"items": ["a"], "prompts": ["b"]}}, "data.prompts", "keep one of them"),
    ("inference", {"data": {"items": ["a"], "separator": "x"}}, "data.separator", "of a training"),
    ("inference", {"data": {"items": ["a"], "eval_split": 0.5}}, "data.eval_split", "max_items"),
    ("ppo", {"data": {"prompts": ["a"], "eval_split": 0.5}}, "data.eval_split", "evaluates nothing"),
    ("dpo", {"data": {**PAIRS, "separator": "x"}}, "data.separator", "not used by taskType dpo"),
    ("sft", {"data": {**ROWS, "eval_split": "test"}}, "data.eval_split", "only data sets of the hub have"),
    ("rag", {"search": {"documents": {"items": ["a"], "split": "x"}}}, "search.documents.split", "type dataset"),
    ("inference", {"data": {**FILE, "columns": {"prompt": "q", "colour": "z"}}}, "data.columns.colour", "is no role"),
    ("inference", {"data": {**FILE, "columns": {"prompt": "q", "text": "z"}}}, "data.columns.text", "prompt names"),
    ("inference", {"data": {**FILE, "column": "a", "columns": {"prompt": "q"}}}, "data.column", "columns counts"),
    ("embedding", {"data": {**FILE, "columns": {"prompt": "q"}}}, "data.columns.prompt", "it reads text"),
    ("sft", {"data": {**FILE, "columns": {"promt": "q"}}}, "data.columns.promt", "did you mean 'prompt'"),
    ("sft", {"data": {**FILE, "columns": {"prompt": "q"}}}, "data.columns", "prompt and completion"),
    ("dpo", {"data": {**FILE, "columns": {"chosen": "q"}}}, "data.columns", "prompt and chosen and rejected"),
    ("sft", {"data": {"items": [{"promt": "a", "completion": "b"}]}}, "data.items", "the columns found are promt or"),
    ("dpo", {"data": {"items": [{"prompt": "a", "chosen": "b"}]}}, "data.items", "chosen and rejected"),
    ("dpo", {"data": {"items": ["a"]}}, "data.items[0]", "is text"),
    ("inference", {"data": {"items": [{"colour": "a"}]}}, "data.items", "none of the columns"),
    ("sft", {"data": {**ROWS, "columns": {"text": "body"}}}, "data.columns", "names body"),
    ("inference", {"data": {"items": [{"q": "a"}], "column": "p"}}, "data.column", "names p"),
    ("inference", {"model": {"source": {**LOCAL, "revision": "x"}}}, "model.source.revision", "this is a folder"),
    ("inference", {"model": {"source": {**PRESET, "revision": "x"}}}, "model.source.revision", "files of its own"),
    ("inference", {"model": {"source": {"type": "preset", "identifier": "smollm2-135m-instrct"}}},
     "model.source.identifier", "did you mean 'smollm2-135m-instruct'"),
    ("sft", {"data": {"type": "preset", "name": "nothing"}}, "data.name", "is no preset; there are"),
    ("echo", {"output": {"destination": {"type": "local", "url": "http://h"}}}, "output.destination.url", "has path"),
    ("echo", {"output": {"destination": {"type": "local", "path": "out"}}}, "output.destination.path", "an absolute"),
    ("echo", {"output": {"destination": {"type": "http", "path": "/x"}}}, "output.destination.path", "headers or url"),
    ("echo", {"output": {"destination": {"type": "http", "url": "s3://b"}}}, "output.destination.url", "http://..."),
    ("echo", {"output": {"destination": {"type": "http", "url": "http://h", "headers": {"X-Team": "a"}}}},
     "output.destination.headers.X-Team", "alone"),
    ("echo", {"output": {"destination": {"type": "s3"}}}, "output.destination.url", "s3://bucket/prefix"),
    ("echo", {"output": {"destination": {"type": "s3", "url": "http://h/x"}}}, "output.destination.url", "s3://"),
    ("sft", {"merge": "always"}, "merge", "never merged"),
    ("sft", {"resultTtlSeconds": 9}, "resultTtlSeconds", "are not merged"),
    ("echo", {"resultTtlSeconds": 9}, "resultTtlSeconds", "merge: always"),
    ("inference", {"resultTtlSeconds": 9, "merge": "never"}, "resultTtlSeconds", "merge is never"),
    ("inference", {"checkpoint": {"load": {"path": "/x", "headers": {"A": "b"}}}},
     "checkpoint.load.headers", "sent to a url"),
    ("sft", {"training": {"merge_adapter": True}}, "training.merge_adapter", "no adapter"),
    ("dpo", {"training": {"eval_strategy": "steps"}}, "training.eval_strategy", "data.eval_split"),
    ("ppo", {"training": {"eval_strategy": "steps"}}, "training.eval_strategy", "evaluates nothing"),
    ("dpo", {"model": {**SOURCE, "transformers": {"load_in_4bit": True}}}, "model.transformers.load_in_4bit", "lora"),
]  # fmt: skip


@pytest.mark.parametrize(("task_type", "fields", "path", "words"), USELESS)
def test_what_has_no_use_here_is_a_mistake(task_type: str, fields: dict[str, Any], path: str, words: str) -> None:
    found = mistakes(asked(task_type, **fields))

    assert words in found[path], found


IDLE: list[tuple[str, dict[str, Any], str]] = [
    ("inference", {"data": {"items": ["a"], "seed": 3}}, "data.seed"),
    ("inference", {"engine": "transformers", "model": {**SOURCE, "vllm": {"max_model_len": 9}}}, "model.vllm"),
    ("echo", {"resources": {"hardware": {"gpu": {"count": 0, "type": "A100"}}}}, "resources.hardware.gpu.type"),
    ("rag", {"search": {"documents": ["a"], "context_characters": 9}}, "search.context_characters"),
]


@pytest.mark.parametrize(("task_type", "fields", "path"), IDLE)
def test_what_changes_nothing_is_a_warning(task_type: str, fields: dict[str, Any], path: str) -> None:
    assert told(asked(task_type, **fields))[path].startswith("is not used: ")


RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"data": {**ROWS, "seed": 3, "eval_split": 0.1}, "training": {"eval_strategy": "steps"}}),
    ("sft", {"data": {"url": "a/b", "split": "train", "name": "main", "revision": "r", "eval_split": "test"}}),
    ("sft", {"data": {**FILE, "columns": {"messages": "m", "tools": "t"}}}),
    ("lora_sft", {"training": {"merge_adapter": True}, "model": {**SOURCE, "adapters": [{"path": "/x"}]}}),
    ("dpo", {"lora": {}, "model": {**SOURCE, "transformers": {"load_in_4bit": True}}}),
    ("container", {"model": {"source": LOCAL}}),
    ("sft", {"data": {"items": ["a", "b"]}}),
    ("sft", {"data": {"items": [{"body": "a"}], "columns": {"text": "body"}}}),
    ("ppo", {"data": {"items": [{"question": "a"}]}}),
    ("inference", {"data": {"items": ["a", {"prompt": "b"}, [{"role": "user", "content": "c"}]]}}),
    ("inference", {"data": {"items": [{"q": "a"}], "column": "q"}}),
    ("inference", {"model": {"source": {**PRESET, "revision": "main"}}, "resultTtlSeconds": 9}),
    ("inference", {"model": {"source": {"type": "huggingface", "identifier": "a/b", "revision": "r"}}}),
    ("echo", {"merge": "always", "resultTtlSeconds": 9}),
    ("echo", {"output": {"destination": {"type": "s3", "path": "s3://bucket/x"}}}),
    ("echo", {"output": {"destination": {"type": "http", "url": "${env:U}"}}}),
    ("echo", {"output": {"destination": {"type": "http", "headers": {"Authorization": "Bearer ${env:A}"}}}}),
    ("acme.words", {"data": {"items": ["a"], "separator": "x", "columns": {"anything": "x"}}, "model": SOURCE}),
]  # fmt: skip


@pytest.mark.parametrize(("task_type", "fields"), RIGHT)
def test_what_has_its_use_is_taken_without_a_word(task_type: str, fields: dict[str, Any]) -> None:
    assert not {path for path in told(asked(task_type, **fields)) if path != "output.destination"}


def test_of_another_project_it_is_taken_out_with_a_warning_unless_it_contradicts() -> None:
    source = asked("sft", "flowmesh/v1", model={**SOURCE, "vllm": {"max_model_len": 9}}, data={**ROWS, "split": "x"})
    found = parse(source)

    assert {"spec.model.vllm", "spec.data.split"} <= {one.path for one in found.warnings}
    assert "vllm" not in found.stages[0].spec["model"]
    assert "split" not in found.stages[0].spec["data"]
    assert "data.path" in mistakes(asked("inference", "flowmesh/v1", data={**FILE, "items": ["a"]}))


def test_a_stage_has_of_its_base_what_it_has_use_for() -> None:
    model = {**SOURCE, "vllm": {"max_model_len": 9}, "transformers": {"dtype": "float32"}}
    stages = [
        {"name": "a", "spec": {"taskType": "sft", "data": ROWS}},
        {"name": "b", "spec": {"taskType": "inference", "data": {"items": ["x"]}}},
        {"name": "c", "spec": {"taskType": "command", "command": "ls"}},
    ]
    found = parse({"apiVersion": "gpuflow/v1", "spec": {"model": model, "stages": stages}})

    assert not found.warnings
    assert [set(stage.spec.get("model", ())) for stage in found.stages] == [
        {"source", "transformers"}, {"source", "transformers", "vllm"}, set()
    ]  # fmt: skip


def test_rows_of_a_stage_beside_those_of_its_base_are_a_mistake_that_says_how_to_replace_them() -> None:
    base = {"taskType": "inference", "model": SOURCE, "data": {"type": "dataset", "url": "a/b"}}
    stage = {"name": "a", "spec": {"data": {"items": ["x"]}}}
    found = mistakes({"apiVersion": "gpuflow/v1", "spec": {**base, "stages": [stage]}})
    assert "`type` beside it replaces" in found["stages[0].spec.data.items"]

    stage["spec"] = {"data": {"type": "list", "items": ["x"]}}
    (done,) = parse({"apiVersion": "gpuflow/v1", "spec": {**base, "stages": [stage]}}).stages
    assert done.spec["data"] == {"type": "list", "items": ["x"]}


def test_specs_that_an_earlier_version_has_stored_go_on() -> None:
    stored = {"taskType": "echo", "model": {"source": {"type": "huggingface", "identifier": "a/b"}}}
    assert canonical(stored) == stored
    assert canonical({"taskType": "inference", **TASKS["inference"], "data": {"items": ["a"], "split": "x"}})


def test_each_field_of_data_model_and_destination_has_its_types() -> None:
    checked_elsewhere = {"type", "max_items", "separator", "shard", "trust_remote_code", "sha256", "include"}
    assert set(Data.model_fields) == {*_OF_TYPES} | checked_elsewhere, "say which types of data have a new field"
    assert set(Model.model_fields) == {"source"} | {part for section, part in PARTS_USED_BY if section == "model"}
    named = {field for fields in _OF_DESTINATIONS.values() for field in fields}
    assert set(Destination.model_fields) == {"type", "method", "timeoutSec", "retries", "secret"} | named


def test_the_tables_are_those_of_who_reads_the_fields() -> None:
    for task_type, forms in (("sft", columns.SUPERVISED), ("dpo", columns.PREFERENCES), ("ppo", columns.PROMPTS)):
        assert FORMS[task_type] == forms.groups
        assert (task_type in TAKE_TOOLS) == forms.takes_tools
