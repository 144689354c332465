"""Pairs of calls that must share a key, and pairs that must not."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytest

from executors.generation.parameters import Sampling
from gpuflow.merge.keys import SAMPLING_DEFAULTS, MergeKey, merge_key
from gpuflow.spec import canonical

BASE: dict[str, Any] = {
    "taskType": "inference",
    "model": {"source": {"type": "huggingface", "identifier": "org/model"}},
    "data": {"type": "list", "items": ["What is a queue?"]},
    "inference": {"temperature": 0, "max_tokens": 16},
}
EMBEDDING: dict[str, Any] = {
    "taskType": "embedding",
    "model": {"source": {"type": "huggingface", "identifier": "org/encoder"}},
    "data": {"type": "list", "items": ["a", "b"]},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with dotted paths set; None takes a field out."""
    spec = copy.deepcopy(base)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = spec
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    return spec


def key_of(
    spec: dict[str, Any], *, owner: str = "ana", asks: tuple[str, ...] = ("gpu",), version: str = "1"
) -> MergeKey:
    key = merge_key(canonical(spec), owner=owner, asks=asks, version=version)
    assert key is not None
    return key


SAME = [
    ({"inference.top_p": 1.0}, "a default that is written out"),
    ({"inference.top_p": 1}, "an integer for a float"),
    ({"inference.temperature": 0.0}, "0.0 for 0"),
    ({"inference.max_tokens": 16.0}, "16.0 for 16"),
    ({"inference.max_tokens": None, "inference.max_new_tokens": 16}, "an alias"),
    ({"inference.n": 1}, "one answer, written out"),
    ({"inference.stop": []}, "no stop text"),
    ({"inference.top_k": -1}, "all tokens, as vLLM writes it"),
    ({"inference.top_k": 0}, "all tokens"),
    ({"inference.stream": False}, "no streaming, written out"),
    ({"inference.repetition_penalty": 1}, "a penalty that changes nothing"),
    ({"model.source.revision": "main"}, "the default revision"),
    ({"model.adapters": []}, "no adapter"),
    ({"model.vllm": {}}, "an empty section"),
    ({"priority": 9}, "the caller's priority"),
    ({"notify": [{"on": ["failed"], "url": "https://example.org/x"}]}, "the caller's notices"),
    ({"resultTtlSeconds": 60}, "for how long its result may be used again"),
    ({"sloSeconds": 5}, "the caller's aim"),
    ({"merge": "always"}, "how it was asked to be merged"),
    ({"data": {"items": ["What is a queue?"]}}, "the type of the data, left out"),
    ({"parallel": {"enabled": False}}, "splitting that is switched off"),
    ({"retry": {}}, "an empty retry"),
]

OTHER = [
    ({"data.items": ["What is a queue? "]}, "a blank more"),
    ({"data.items": ["what is a queue?"]}, "another case"),
    ({"data.items": ["What is a queue?", "What is a queue?"]}, "two prompts"),
    ({"data.items": [[{"role": "user", "content": "What is a queue?"}]]}, "a chat"),
    ({"inference.max_tokens": 17}, "a longer answer"),
    ({"inference.temperature": 0.1, "inference.seed": 1}, "another temperature"),
    ({"inference.seed": 7}, "a seed"),
    ({"inference.top_p": 0.9}, "another top_p"),
    ({"inference.stop": ["."]}, "a stop text"),
    ({"inference.stop_token_ids": [2]}, "a stop token"),
    ({"inference.ignore_eos": True}, "no end of text"),
    ({"inference.repetition_penalty": 1.1}, "a penalty"),
    ({"inference.presence_penalty": 0.5}, "another penalty"),
    ({"inference.skip_special_tokens": False}, "special tokens in the text"),
    ({"inference.system_prompt": "Be brief."}, "a system prompt"),
    ({"inference.chat_template_kwargs": {"thinking": True}}, "an argument of the chat template"),
    ({"inference.batch_size": 2}, "another batch size, which changes rounding"),
    ({"inference.stream": True}, "streaming: its callers see the text as it comes"),
    ({"model.source.identifier": "org/other"}, "another model"),
    ({"model.source.revision": "v2"}, "another revision"),
    ({"model.source.type": "local"}, "another source"),
    ({"model.adapters": [{"type": "lora", "path": "/a"}]}, "an adapter"),
    ({"model.transformers": {"torch_dtype": "float32"}}, "another precision"),
    ({"checkpoint": {"load": {"type": "path", "url": "/weights"}}}, "other weights"),
    ({"engine": "transformers"}, "another engine"),
    ({"environment": "vllm"}, "another environment"),
    ({"env": {"TOKENIZERS_PARALLELISM": "1"}}, "a variable"),
    ({"secrets": ["HF_TOKEN"]}, "a secret"),
    ({"timeout": "10m"}, "a limit of time"),
    ({"retry": {"max_attempts": 5}}, "another policy of retries"),
    ({"output": {"artifacts": ["responses.json"]}}, "other outputs"),
    ({"data.max_items": 1}, "fewer records"),
]


@pytest.mark.parametrize(("changes", "why"), SAME, ids=[why for _, why in SAME])
def test_calls_that_give_the_same_output_have_one_key(changes: dict[str, Any], why: str) -> None:
    assert key_of(changed(BASE, changes)).call == key_of(BASE).call, why


@pytest.mark.parametrize(("changes", "why"), OTHER, ids=[why for _, why in OTHER])
def test_calls_that_may_give_another_output_have_other_keys(changes: dict[str, Any], why: str) -> None:
    assert key_of(changed(BASE, changes)).call != key_of(BASE).call, why


def test_the_order_of_fields_does_not_matter() -> None:
    backwards = {name: BASE[name] for name in reversed(BASE)}
    backwards["inference"] = dict(reversed(BASE["inference"].items()))
    assert key_of(backwards).call == key_of(BASE).call


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"owner": "ana"}, {"owner": "bo"}),
        ({"asks": ("gpu",)}, {"asks": ("gpu-a100",)}),
        ({"asks": ("gpu",)}, {"asks": ("gpu", "cpu")}),
        ({"version": "1"}, {"version": "2"}),
    ],
)
def test_owner_queues_and_version_are_part_of_the_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key_of(BASE, **one).call != key_of(BASE, **other).call
    assert key_of(BASE, **one).batch != key_of(BASE, **other).batch


def test_numbers_in_data_are_text_and_keep_their_spelling() -> None:
    one, other = (changed(EMBEDDING, {"data.items": [{"text": value}]}) for value in (1, 1.0))
    assert key_of(one).call != key_of(other).call


@pytest.mark.parametrize(
    ("changes", "merged"),
    [
        ({}, True),
        ({"inference": {"seed": 3}}, True),
        ({"inference": {"temperature": 0.7}}, False),
        ({"inference": {}}, False),
        ({"inference": {"temperature": 0.7}, "merge": "always"}, True),
        ({"merge": "never"}, False),
        ({"data": {"type": "jsonl", "path": "/data/x.jsonl"}}, False),
        ({"data": {"type": "jsonl", "url": "https://example.org/x.jsonl", "sha256": "a" * 64}}, True),
        ({"data": {"type": "jsonl", "path": "/data/x.jsonl"}, "merge": "always"}, True),
    ],
)
def test_what_is_merged(changes: dict[str, Any], merged: bool) -> None:
    spec = canonical({**BASE, **changes})
    assert (merge_key(spec, owner="", asks=["gpu"], version="1") is not None) is merged
    assert merge_key(spec, owner="", asks=["gpu"], version="1", enabled=False) is None


def test_other_task_types_merge_only_where_their_author_says_so() -> None:
    echo = {"taskType": "echo", "echo": {"output": 1}}
    train = {"taskType": "sft", "model": BASE["model"], "data": {"type": "list", "items": ["x"]}, "merge": "always"}
    assert merge_key(canonical(echo), owner="", asks=["cpu"], version="1") is None
    assert merge_key(canonical({**echo, "merge": "always"}), owner="", asks=["cpu"], version="1") is not None
    assert merge_key(canonical(train), owner="", asks=["cpu"], version="1") is None


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({"data.items": ["Something else"]}, True),
        ({"inference.max_tokens": 99}, True),
        ({"inference.seed": 1}, True),
        ({"model.source.identifier": "org/other"}, False),
        ({"model.adapters": [{"type": "lora", "path": "/a"}]}, False),
        ({"env": {"A": "1"}}, False),
        ({"retry": {"max_attempts": 5}}, False),
    ],
)
def test_what_shares_a_run(changes: dict[str, Any], together: bool) -> None:
    assert (key_of(changed(BASE, changes)).batch == key_of(BASE).batch) is together


@pytest.mark.parametrize("changes", [{"timeout": "10m"}, {"output": {"artifacts": ["responses.json"]}}])
def test_a_call_with_a_limit_or_outputs_of_its_own_shares_no_run(changes: dict[str, Any]) -> None:
    assert key_of(changed(BASE, changes)).batch == ""


def test_the_spec_of_a_run_has_nothing_of_one_caller() -> None:
    of_caller = {"priority": 9, "notify": [{"on": ["failed"], "url": "https://example.org/x"}], "resultTtlSeconds": 9}
    assert key_of(changed(BASE, of_caller)).spec == key_of(BASE).spec


def test_the_defaults_are_those_of_the_executor() -> None:
    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    ours = {name: value for name, value in SAMPLING_DEFAULTS.items() if name != "stream"}
    theirs = {name: plain(value) for name, value in asdict(Sampling()).items() if name not in ("seed", "structured")}
    assert ours == theirs


def test_tokens_are_an_estimate_of_prompts_and_answers() -> None:
    assert key_of(BASE).tokens == 20 // 4 + 16
    assert key_of(changed(BASE, {"data.items": ["x" * 400] * 3})).tokens > 3 * 116
