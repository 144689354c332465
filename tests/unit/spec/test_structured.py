"""What `inference.structured_outputs` may ask for is judged before anything runs: cause and mend at the place."""

from __future__ import annotations

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import canonical

TASK = {"taskType": "inference", "model": {"source": {"identifier": "m"}}, "data": {"type": "list", "items": ["a"]}}


def _mistakes(asked, **task):
    try:
        canonical({**TASK, **task, "inference": {"structured_outputs": asked}})
    except InvalidTemplate as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "object", "properties": {"not": {"type": "string"}, "if": True}, "default": {"not": 1}}},
        {"json": '{"type": "array", "items": {"$ref": "#"}, "maxItems": 10000}'},
        {"json": {"enum": [{"uniqueItems": True}]}, "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": "[ ]?"},
        {"regex": r"a{1,9}\\1"},
        {"choice": ["a", "b"]},
        {"grammar": "root ::= a"},
    ],
)
def test_what_can_be_kept_to_is_taken(asked):
    assert _mistakes(asked) == ""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "says nothing of the answer"),
        ({"json": {}, "regex": "a"}, "has json and regex"),
        ({"jsn": {}, "json": {}}, "jsn: is unknown"),
        ({"json": 5}, "structured_outputs.json: is 5"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[" * 100_000}, "is no JSON"),
        ({"json": {"items": [{"not": {}}]}}, "json.items[0].not: cannot be kept to"),
        ({"json": {"properties": {"a": {"uniqueItems": True}}}}, "properties.a.uniqueItems: cannot be kept to"),
        ({"json": {"type": "strin"}}, "json.type: is"),
        ({"json": {"type": 5}}, "json.type"),
        ({"json": {"type": [{}]}}, "json.type"),
        ({"json": {"properties": {"a": 5}}}, "a schema is a mapping"),
        ({"json": {"enum": []}}, "it must be a list of values"),
        ({"json": {"maxItems": 100_000_000}}, "from 0 to 10000"),
        ({"json": {"pattern": "(?<!a)b"}}, "looks around or refers back"),
        ({"json": {"patternProperties": {r"(a)\1": {}}}}, "looks around or refers back"),
        ({"json": {"$ref": "https://example.org/schema"}}, "only definitions of the same schema"),
        ({"json": {"enum": ["a" * 300_000]}}, "more than 262144 characters"),
        ({"regex": "a{1,99999}"}, "more than 10000 times"),
        ({"regex": "a{" + "9" * 5000 + "}"}, "more than 10000 times"),
        ({"regex": 5}, "it must be a regular expression"),
        ({"choice": []}, "it must be a list of texts"),
        ({"choice": ["a", 5]}, "it must be a list of texts"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(asked, says):
    assert says in _mistakes(asked)


def test_a_schema_that_is_too_deep_is_refused():
    text = '{"anyOf": [' * 70 + "{}" + "]}" * 70
    assert "more than 64 schemas" in _mistakes({"json": text})
