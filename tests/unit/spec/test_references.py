"""References: reading, resolving, escaping, and what a model's output must never be able to do."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.spec.references import (
    UnresolvedReference,
    escape,
    find_references,
    parse_reference,
    pick,
    resolve,
    resolve_env,
)
from gpuflow.spec.report import Findings
from gpuflow.spec.stages import collect_references

RESULTS = {"ask": {"items": [{"output": "hi", "n": 3}], "none": None, "ok": True}, "tune": {"loss": 0.5}}
LOOKALIKES = ["${env:A}", "$${env:A}", "${a.b}", "$", "{"]
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(LOOKALIKES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


def lookup(reference):
    return pick(RESULTS[reference.name], reference)


@pytest.mark.parametrize(
    ("inside", "name", "path"),
    [
        ("tune.result", "tune", ()),
        ("tune.result.loss", "tune", ("loss",)),
        ("tune.loss", "tune", ("loss",)),
        ("a-b_1.items[0].output", "a-b_1", ("items", 0, "output")),
        ("a.items.0.output", "a", ("items", 0, "output")),
        ("a.result.result", "a", ("result",)),
        (" a.b ", "a", ("b",)),
        ("2.b", "2", ("b",)),
    ],
)
def test_stage_references(inside, name, path):
    reference = parse_reference(inside)

    assert (reference.kind, reference.stage, reference.path) == ("stage", name, path)


def test_env_references():
    assert parse_reference("env:HF_TOKEN").kind == "env"
    assert parse_reference("env:HF_TOKEN").name == "HF_TOKEN"


@pytest.mark.parametrize(
    "inside", ["", "a", "a.", ".b", "a b.c", "env:", "env:1x", "a.b[x]", "a..b", "a.b[-1]", "HOME"]
)
def test_what_is_no_reference_says_what_to_write(inside):
    with pytest.raises(ValueError, match="is not a reference; "):
        parse_reference(inside)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${ask.items}", [{"output": "hi", "n": 3}]),
        ("${ask.result.items[0].n}", 3),
        ("${ask.ok}", True),
        ("${ask.none}", None),
        ("n=${ask.items[0].n}, ok=${ask.ok}, none=${ask.none}", "n=3, ok=true, none=null"),
        ("all: ${ask.items}", 'all: [{"output": "hi", "n": 3}]'),
        ("$${ask.items}", "${ask.items}"),
        ("$$${ask.items}", "$${ask.items}"),
        ("costs $5 {or} $x", "costs $5 {or} $x"),
        ("$${a ${tune.loss}}", "${a 0.5}"),
        ("${env:X} ${tune.loss}", "${env:X} 0.5"),
        ("${env:X}", "${env:X}"),
        ("$${env:X}", "$${env:X}"),
    ],
)
def test_resolve(text, value):
    assert resolve({"k": [text]}, lookup) == {"k": [value]}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("${ask.items[4]}", r"ask.result.items has 1 entries, so there is no \[4\]"),
        ("${ask.itens}", "ask.result has no 'itens'; it has items, none, ok"),
        ("${tune.loss.value}", "tune.result.loss is a number, so it has no 'value'"),
        ("${ask.items.outputs}", r"ask.result.items\[0\] has no 'outputs'"),
        ("${ask.none.x}", "is null"),
        ("x ${ask}", "whole result"),
        ("x ${ask.items", "not closed"),
    ],
)
def test_a_missing_value_names_the_path_and_what_was_there(text, cause):
    with pytest.raises(UnresolvedReference, match=cause):
        resolve(text, lookup)


@given(NESTED)
def test_escaped_data_comes_back_as_it_was(value):
    assert resolve_env(resolve(escape(value), lookup), {}) == value


@given(NESTED)
def test_a_whole_reference_gives_the_value_itself(value):
    assert resolve_env(resolve("${x.y}", lambda reference: value), {}) == value


@given(st.text(alphabet="${}env:AB ."), st.text(alphabet="${}env:AB ."))
def test_what_a_stage_gave_never_reads_the_environment(one, two):
    values = iter([one, two])
    text = resolve("<${x.a}${x.b}>", lambda reference: next(values))

    assert resolve_env(text, {"A": "secret", "AB": "secret", "B": "secret"}) == f"<{one}{two}>"


def test_resolve_env():
    assert resolve_env({"k": ["a ${env:X}", "$${env:X}"]}, {"X": "1"}) == {"k": ["a 1", "${env:X}"]}
    with pytest.raises(UnresolvedReference, match="X is not set for this task"):
        resolve_env("${env:X}", {})


def test_find_references():
    found = find_references({"a": ["${x.y}", "${env:E} $${no.no} ${z.w[0]}"], "b": 3})

    assert [(one.kind, one.name) for one in found] == [("stage", "x"), ("env", "E"), ("stage", "z")]


@given(st.text())
def test_any_text_resolves_or_says_why(text):
    with contextlib.suppress(UnresolvedReference):
        resolve(text, lambda reference: 1)


@pytest.mark.parametrize(("text", "found", "mistakes"), [("${a.b}${a.c}", 2, 0), ("${}", 0, 1)])
def test_what_a_text_repeats_is_collected_once(text, found, mistakes):
    noted = Findings()

    _, references = collect_references({"x": text * 5000, "y": [text]}, noted, foreign=False)

    assert len(references) == 2 * found, "once for each place"
    assert len(noted.mistakes) == 2 * mistakes
