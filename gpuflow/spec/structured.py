"""Structured output of foreign templates: `inference.templates`, a schema or a list of fields, as a JSON schema. Pure.

Used by `dialect`.
"""

from __future__ import annotations

from typing import Any, Final

from gpuflow.spec.report import Findings, Path, one_of, show

_AT: Final[Path] = ("inference", "templates")
_TYPES: Final = {
    "int": {"type": "integer"}, "integer": {"type": "integer"},
    "float": {"type": "number"}, "number": {"type": "number"},
    "str": {"type": "string"}, "string": {"type": "string"},
    "bool": {"type": "boolean"}, "boolean": {"type": "boolean"},
    "date": {"type": "string", "format": "date"}, "datetime": {"type": "string", "format": "date-time"},
}  # fmt: skip
_KNOWN: Final = frozenset({"name", "type", "min", "max", "candidates", "description"})


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
