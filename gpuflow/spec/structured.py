"""Structured output: what `inference.structured_outputs` may ask for, and foreign templates' `inference.templates`, a
schema or a list of fields, as a JSON schema. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow.spec.references import walk_references
from gpuflow.spec.report import Findings, Path, one_of, show, suggest

_AT: Final[Path] = ("inference", "templates")
_TYPES: Final = {
    "int": {"type": "integer"}, "integer": {"type": "integer"},
    "float": {"type": "number"}, "number": {"type": "number"},
    "str": {"type": "string"}, "string": {"type": "string"},
    "bool": {"type": "boolean"}, "boolean": {"type": "boolean"},
    "date": {"type": "string", "format": "date"}, "datetime": {"type": "string", "format": "date-time"},
}  # fmt: skip
_KNOWN: Final = frozenset({"name", "type", "min", "max", "candidates", "description"})

#: What an answer can be, of which one is asked for; and what says more of it.
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_VLLM_ALONE: Final = ("grammar", "structural_tag")
#: Most characters of a schema, a regex, or all words of a choice.
_MOST_CHARACTERS: Final = 262_144
#: Largest number of repetitions: compiling takes time in proportion to it, or more.
_MOST_REPEATED: Final = 10_000
#: Most schemas inside a schema, and how deep they may stand in one another.
_MOST_DEPTH: Final = 64
_COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
#: Keywords that restrict an answer and that no engine can keep to while it writes.
_UNKEPT: Final = frozenset(
    {
        "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "contains",
        "minContains", "maxContains", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    }
)  # fmt: skip
#: Keywords whose value is one schema, a list of schemas, or schemas by name.
_ONE: Final = ("items", "additionalProperties", "additionalItems")
_SEVERAL: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
_JSON_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_AROUND: Final = re.compile(r"\(\?(?:<?[=!])|\\[1-9]|\\k<")
_REPEATED: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_structured(spec: Mapping[str, Any], findings: Findings) -> None:
    """Note what is wrong with `inference.structured_outputs`; one with references waits for their values."""
    section = spec.get("inference")
    given = section.get("structured_outputs") if isinstance(section, Mapping) else None
    if not isinstance(given, Mapping) or any(True for _ in walk_references(given)):
        return
    for path, message in wrong_structure(given):
        findings.add(("inference", "structured_outputs", *path), message)
        if findings.full:
            return


def needs_vllm(given: Any) -> list[str]:
    """Return what of `structured_outputs` vLLM has alone."""
    return [name for name in _VLLM_ALONE if isinstance(given, Mapping) and given.get(name) is not None]


def wrong_structure(given: Any) -> Iterator[tuple[Path, str]]:
    """Yield what no engine can keep to: the path within `structured_outputs`, and cause and mend."""
    if not isinstance(given, Mapping):
        yield (), f"is {show(given)}; it must be a mapping with {one_of(_KINDS)}"
        return
    for name in given:
        if name not in _KINDS and name not in _OPTIONS:
            known = (*_KINDS, *_OPTIONS)
            yield (str(name),), f"is unknown; structured_outputs has {one_of(known)}{suggest(name, known)}"
    kinds = [name for name in _KINDS if given.get(name) not in (None, False)]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "says nothing of the answer"
        yield (), f"{found}; it must have one of {', '.join(_KINDS)}"
        return
    name, value = kinds[0], given[kinds[0]]
    if name == "json":
        yield from _wrong_json(value)
    elif name == "regex":
        yield from ((("regex",), message) for message in _wrong_regex(value))
    elif name == "choice":
        words = value if isinstance(value, list) else []
        if not words or not all(isinstance(word, str) and word for word in words):
            yield ("choice",), f"is {show(value)}; it must be a list of texts, none of them empty"
        elif sum(map(len, words)) > _MOST_CHARACTERS:
            yield ("choice",), f"has more than {_MOST_CHARACTERS} characters; offer fewer"
    if isinstance(given.get("whitespace_pattern"), str):
        yield from ((("whitespace_pattern",), message) for message in _wrong_regex(given["whitespace_pattern"]))


def _wrong_json(value: Any) -> Iterator[tuple[Path, str]]:
    schema, at = value, ("json",)
    if isinstance(value, str):
        if len(value) > _MOST_CHARACTERS:
            yield at, f"has more than {_MOST_CHARACTERS} characters; make it smaller"
            return
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            yield at, f"is no JSON: {error}; give the schema as a mapping"
            return
    if not isinstance(schema, Mapping):
        yield at, f"is {show(schema)}; it must be a JSON schema, a mapping"
        return
    wrong = list(_wrong_schema(schema, at, 0))
    yield from wrong
    if wrong:
        return
    try:
        size = len(json.dumps(schema, default=str))
    except RecursionError:
        yield at, "is too deep; make it flatter"
    else:
        if size > _MOST_CHARACTERS:
            yield at, f"has more than {_MOST_CHARACTERS} characters; make it smaller"


def _wrong_schema(schema: Any, at: Path, depth: int) -> Iterator[tuple[Path, str]]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield at, f"is {show(schema)}; a schema is a mapping"
        return
    if depth > _MOST_DEPTH:
        yield at, f"stands in more than {_MOST_DEPTH} schemas; make it flatter"
        return
    for name in sorted(_UNKEPT & set(map(str, schema))):
        yield (*at, name), "cannot be kept to while an answer is written; take it out, and check the answer for it"
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _JSON_TYPES:
            yield (*at, "type"), f"is {show(kind)}; it must be {one_of(_JSON_TYPES)}{suggest(kind, _JSON_TYPES)}"
    if schema.get("enum") is not None and (not isinstance(schema["enum"], list) or not schema["enum"]):
        yield (*at, "enum"), f"is {show(schema['enum'])}; it must be a list of values"
    for name in sorted(_COUNTS & set(map(str, schema))):
        count = schema[name]
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_REPEATED:
            yield (*at, name), f"is {show(count)}; it must be a number from 0 to {_MOST_REPEATED}"
    if schema.get("pattern") is not None:
        yield from (((*at, "pattern"), message) for message in _wrong_regex(schema["pattern"]))
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        yield (*at, "$ref"), f"is {show(reference)}; only definitions of the same schema (#/...) are read"
    if isinstance(schema.get("patternProperties"), Mapping):
        for pattern in schema["patternProperties"]:
            yield from (((*at, "patternProperties", pattern), message) for message in _wrong_regex(pattern))
    for name in _ONE:
        if schema.get(name) is not None and not isinstance(schema[name], list):
            yield from _wrong_schema(schema[name], (*at, name), depth + 1)
    for name in _SEVERAL:
        for index, part in enumerate(schema[name] if isinstance(schema.get(name), list) else ()):
            yield from _wrong_schema(part, (*at, name, index), depth + 1)
    for name in _NAMED:
        for key, part in (schema[name] if isinstance(schema.get(name), Mapping) else {}).items():
            yield from _wrong_schema(part, (*at, name, str(key)), depth + 1)


def _wrong_regex(value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not value:
        yield f"is {show(value)}; it must be a regular expression"
    elif len(value) > _MOST_CHARACTERS:
        yield f"has more than {_MOST_CHARACTERS} characters; make it smaller"
    elif _AROUND.search(value.replace("\\\\", "")):
        yield "looks around or refers back, which cannot be kept to while an answer is written; write it without"
    elif any(
        len(count) > 9 or int(count or 0) > _MOST_REPEATED
        for found in _REPEATED.findall(value)
        for count in found
        if count
    ):
        yield f"repeats something more than {_MOST_REPEATED} times; repeat it less"


def schema_of(templates: Any, findings: Findings) -> dict[str, Any] | None:
    """Return the JSON schema that `templates` asks for; None where it has a mistake, which is noted."""
    if isinstance(templates, dict) and templates:
        return templates
    if not isinstance(templates, list) or not templates:
        findings.add(_AT, f"is {show(templates)}; it must be a JSON schema, or a list of fields with name and type")
        return None
    before = len(findings.mistakes)
    properties: dict[str, Any] = {}
    for index, field in enumerate(templates):
        at = (*_AT, index)
        name = field.get("name") if isinstance(field, dict) else None
        if not isinstance(name, str) or not name:
            findings.add(at, f"is {show(field)}; a field is a mapping with name, and type or candidates")
        elif name in properties:
            findings.add((*at, "name"), f"{show(name)} is the name of another field too; rename one")
        else:
            properties[name] = _property(field, at, findings)
    if len(findings.mistakes) > before:
        return None
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _property(field: dict[str, Any], at: Path, findings: Findings) -> dict[str, Any]:
    for name in sorted(set(map(str, field)) - _KNOWN):
        findings.add((*at, name), f"unknown field; the fields here are {one_of(sorted(_KNOWN))}")
    about = {"description": field["description"]} if isinstance(field.get("description"), str) else {}
    candidates = field.get("candidates")
    if candidates is not None:
        if not isinstance(candidates, list) or not candidates:
            findings.add((*at, "candidates"), f"is {show(candidates)}; it must be a list of values")
            return about
        return {"enum": candidates, **about}
    kind = field.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        findings.add((*at, "type"), f"is {show(kind)}; it must be {one_of(_TYPES)}")
        return about
    found: dict[str, Any] = {**_TYPES[kind], **about}
    for name, ours in (("min", "minimum"), ("max", "maximum")):
        limit = field.get(name)
        if limit is None:
            continue
        if found["type"] in ("integer", "number") and isinstance(limit, int | float) and not isinstance(limit, bool):
            found[ours] = limit
        else:
            findings.warn((*at, name), f"is not used: a JSON schema has no such limit for type {kind}")
    return found
