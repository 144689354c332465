"""Structured output on transformers: what a model of random weights writes fits schema, regex or choice."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import Draft202012Validator

from executors.base import ExecutorError
from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

WORD = {"type": "string", "maxLength": 6}
NUMBER = {"type": "integer", "minimum": -5, "maximum": 99}


def _object(properties, **more):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


SCHEMAS = [
    WORD,
    NUMBER,
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None]}},
    {"enum": ["good", "bad", 3, None, [1]]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    _object({"name": WORD, "age": NUMBER}),
    _object({"who": _object({"name": WORD}), "tags": {"type": "array", "items": WORD, "maxItems": 2}}),
    {"anyOf": [_object({"a": {"const": 1}}), _object({"b": NUMBER})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"type": ["boolean", "null"]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": _object({"left": NUMBER, "right": NUMBER})}},
    _object({"ü": {"enum": ["é", "日本", '"\\']}}),
]


@pytest.fixture
def one_thread():
    """Threads that wait for one another cost a model this small more than they bring, the more so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_every_answer_of_a_random_model_fits_its_schema(tiny_model):
    """Each row of a batch has a schema of its own; greedy and sampled, several answers each, against other rules."""
    from transformers import AutoModelForCausalLM

    from executors.generation.parameters import Sampling, read_sampling
    from executors.generation.prompts import Rendered
    from executors.generation.text_generator import TextGenerator, Weights
    from executors.modeling.loading import load_tokenizer
    from executors.modeling.location import Location

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    weights = Weights(model, load_tokenizer(Location(place=str(tiny_model), name="tiny"), padding_side="left"))
    asked = [{"json": schema, "disable_any_whitespace": True} for schema in SCHEMAS]
    prompts = [Rendered(text=text, templated=False) for text in ("Hello", "Good morning")] * 10
    structures = [read_sampling({"structured_outputs": one}).structured for one in asked]
    greedy = Sampling(max_tokens=100, temperature=0, ignore_eos=True, no_repeat_ngram_size=1)
    for sampling in [greedy, Sampling(max_tokens=100, n=2, seed=1, min_tokens=2)]:
        generator = TextGenerator(weights, sampling)
        answers = generator.answer(prompts, lambda rows: None, structures)
        for schema, rows in zip(SCHEMAS, answers, strict=True):
            assert len(rows) == sampling.n
            for row in rows:
                assert row.finish_reason == "stop", (schema, row.text)
                Draft202012Validator(schema).validate(json.loads(row.text))


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-c]{3}(x|yy)"}, "[a-c]{3}(x|yy)"),
        ({"choice": ["red", 'say "no"', "rot\nblau"]}, 'red|say "no"|rot\nblau'),
    ],
)
def test_answers_of_a_task_fit_a_regex_and_a_choice(run, asked, pattern):
    ended = run(
        "inference",
        {
            "data": {"type": "list", "items": [pair["prompt"] for pair in PAIRS[:3]]},
            "inference": {"structured_outputs": asked, "seed": 3},
        },
    )

    assert all(re.fullmatch(pattern, item["output"]) for item in ended.result["items"])
    assert "warnings" not in ended.result


def test_an_answer_that_was_cut_off_is_told(run):
    whole = {"type": "array", "items": NUMBER, "minItems": 30}
    ended = run(
        "inference",
        {
            "data": {"type": "list", "items": ["Hello"]},
            "inference": {"structured_outputs": {"json": whole}, "max_tokens": 5},
        },
    )

    assert ended.result["items"][0]["finish_reason"] == "length"
    assert "1 of 1 answers ended at max_tokens" in ended.result["warnings"][0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "greater than maximum"),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 9}]}}, "oneOf"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format"),
        ({"json": {"$ref": "#/$defs/no"}}, "cannot be kept to"),
        ({"regex": "("}, "unclosed group"),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(9)]} for a in range(9)]}},
            "large",
        ),
    ],
)
def test_a_grammar_that_cannot_be_kept_to_is_refused_with_its_cause(asked, says):
    from executors.generation.parameters import read_sampling
    from executors.generation.structured import Grammars

    with pytest.raises(ExecutorError, match=says) as raised:
        Grammars(None, [0], 8).check(read_sampling({"structured_outputs": asked}).structured)
    assert "take that part out" in str(raised.value)


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch):
    from executors.generation import structured

    monkeypatch.setattr(structured, "COMPILE_SECONDS", 1)
    endless = json.dumps({"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 100_000_000}})
    with pytest.raises(ExecutorError, match="cannot be kept to"):
        structured.Grammars(None, [0], 8).check(endless)


def test_a_grammar_that_takes_long_holds_up_no_other_answer(monkeypatch, tiny_model):
    from transformers import AutoTokenizer

    from executors.generation import structured

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    grammars = structured.Grammars(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    quick, slow = json.dumps({"regex": "a+"}), json.dumps({"regex": "b+"})
    grammars.check(quick)
    is_tried, may_end = threading.Event(), threading.Event()

    def held(grammar):
        is_tried.set()
        assert may_end.wait(60)

    monkeypatch.setattr(structured, "_try", held)
    with ThreadPoolExecutor(2) as pool:
        try:
            compiling = pool.submit(grammars.row, slow)
            assert is_tried.wait(60)
            assert pool.submit(grammars.row, quick).result(timeout=60).allowed(len(tokenizer)).any()
            assert not compiling.done()
        finally:
            may_end.set()
        assert compiling.result(timeout=60).allowed(len(tokenizer)).any()
