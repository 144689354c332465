"""Rewrites the ways in which a spec may be spelled into one. Used by `checking`, before anything is checked.

It changes the copy that it is given, notes in `renamed` where a field stood before, and passes over whatever has the
wrong shape: the checks that follow say what is wrong. Every rewriting can be applied twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from gpuflow.spec.dialect import translate
from gpuflow.spec.engines import choose_engine
from gpuflow.spec.presets import list_presets, names_preset
from gpuflow.spec.references import parse_reference
from gpuflow.spec.report import Findings, Path, Renames, show
from gpuflow.spec.results_out import call_back

#: Data fields of public MLOC and FlowMesh templates -> ours.
_DATA_NAMES: Final = {"dataset_name": "url", "config_name": "name", "max_samples": "max_items"}
#: Column fields of theirs -> role.
_COLUMN_NAMES: Final = {
    "prompt_column": "prompt", "response_column": "completion", "completion_column": "completion",
    "text_column": "text", "chosen_column": "chosen", "rejected_column": "rejected", "label_column": "label",
}  # fmt: skip
_FIELD_NAMES: Final = {
    "prompt_field": "prompt", "response_field": "completion", "completion_field": "completion", "text_field": "text",
    "chosen_field": "chosen", "rejected_field": "rejected", "label_field": "label",
}  # fmt: skip
_SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
#: What a path begins with, as no id on the hub does.
_PATHS: Final = ("/", "./", "../", "~")

#: A path over all rows of a result: a field of `items` without a number between.
_ALL_ROWS: Final = re.compile(r"\.items\.(?!\d)")


def normalise(spec: dict[str, Any], findings: Findings, *, foreign: bool) -> Renames:
    """Rewrite `spec` in place; returns path now -> path as written."""
    renamed: Renames = {}
    if foreign:
        translate(spec, findings, renamed)
    _resources(spec, findings, renamed)
    if spec.get("taskType") == "embedding" and isinstance(spec.get("embedding"), dict):
        _embedding_model(spec, spec["embedding"], findings, renamed)
    _model(spec)
    if isinstance(spec.get("command"), str | list):
        spec["command"] = {"command": spec["command"]}
        renamed["command", "command"] = ("command",)
    if isinstance(spec.get("function"), str):
        spec["function"] = {"name": spec["function"]}
        renamed["function", "name"] = ("function",)
    if spec.get("taskType") == "rag":
        _retrieval(spec, renamed)
    if isinstance(spec.get("data"), dict):
        _data(spec["data"], findings, renamed, foreign=foreign)
    if isinstance(spec.get("inference"), dict):
        _sampling(spec["inference"], findings, foreign=foreign)
    choose_engine(spec, findings)
    call_back(spec, findings, renamed)
    return renamed


def _resources(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    if isinstance(spec.get("resources"), str | list):
        spec["resources"] = {"accelerators": spec["resources"]}
        renamed["resources", "accelerators"] = ("resources",)
    for path in (("gpu",), ("resources", "gpu")):
        holder: Any = spec if len(path) == 1 else spec.get("resources")
        if not isinstance(holder, dict) or not isinstance(holder.get("gpu"), dict):
            continue
        share = holder.pop("gpu")
        resources = spec.setdefault("resources", {})
        if not isinstance(resources, dict):
            continue
        hardware = resources.setdefault("hardware", {})
        gpu = hardware.setdefault("gpu", {}) if isinstance(hardware, dict) else {}
        for key, value in share.items():
            if isinstance(gpu, dict) and gpu.setdefault(key, value) != value:
                findings.add(
                    (*path, key), f"is {show(value)}, but resources.hardware.gpu.{key} is {show(gpu[key])}; keep one"
                )
            renamed["resources", "hardware", "gpu", key] = (*path, key)


def _model(spec: dict[str, Any]) -> None:
    model = spec.get("model")
    source = model.get("source") if isinstance(model, dict) else None
    if isinstance(source, dict) and source.get("type") is None and "identifier" in source:
        source["type"] = "preset" if names_preset(source["identifier"]) else "huggingface"


def _embedding_model(spec: dict[str, Any], section: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """`embedding.model: NAME` is model.source: a shipped preset, a path, or a hub id."""
    name, model = section.get("model"), spec.get("model") or {}
    if not isinstance(name, str) or not isinstance(model, dict) or "${" in name:
        return
    if model.get("source") is None:
        kind = "preset" if name in list_presets("models") else "local" if name.startswith(_PATHS) else "huggingface"
        spec["model"] = {**model, "source": {"identifier": name, "type": kind}}
        renamed["model", "source"] = renamed["model", "source", "identifier"] = ("embedding", "model")
    elif not isinstance(model["source"], dict) or model["source"].get("identifier") != name:
        findings.warn(("embedding", "model"), "is not used: model.source says which model")
    del section["model"]
    if not section:
        del spec["embedding"]


def _retrieval(spec: dict[str, Any], renamed: Renames) -> None:
    """What rag spells shortly: an index by its address, documents as a list; and files of text, which are documents."""
    search = spec.get("search")
    if isinstance(search, dict):
        if isinstance(search.get("index"), str):
            is_path = search["index"].startswith(_PATHS)
            search["index"] = {"path" if is_path else "url": search["index"]}
            renamed["search", "index", "path" if is_path else "url"] = ("search", "index")
        if isinstance(search.get("documents"), list):
            search["documents"] = {"type": "list", "items": search["documents"]}
            renamed["search", "documents", "items"] = ("search", "documents")
        if isinstance(search.get("documents"), dict):
            _documents(search["documents"])
    if spec.get("index") is not None and isinstance(spec.get("data"), dict):
        _documents(spec["data"])


def _documents(data: dict[str, Any]) -> None:
    """Find the type of data that a retrieval reads: a file or folder without a suffix of rows holds documents."""
    if data.get("type") is not None:
        return
    found = _type_of(data)
    field = next((name for name in ("upload", "path", "url") if isinstance(data.get(name), str)), None)
    if found == "jsonl" and field is not None:
        suffix = PurePosixPath(re.sub(r"[?#].*", "", data[field])).suffix.lower()
        found = found if suffix in _SUFFIXES else "documents"
    if found is not None:
        data["type"] = found


def _data(data: dict[str, Any], findings: Findings, renamed: Renames, *, foreign: bool) -> None:
    nested = data.get("jsonl")
    if isinstance(nested, dict):
        del data["jsonl"]
        _from_jsonl(data, nested, findings, renamed)
    for theirs, ours in _DATA_NAMES.items():
        if theirs in data:
            _move(data, theirs, data, ours, ("data", theirs), findings)
            renamed["data", ours] = ("data", theirs)
    columns = data.get("columns")
    for theirs, role in _COLUMN_NAMES.items():
        if theirs in data:
            columns = data.setdefault("columns", {})
            if isinstance(columns, dict):
                _move(data, theirs, columns, role, ("data", theirs), findings)
                renamed["data", "columns", role] = ("data", theirs)
    if data.get("type") is None:
        found = _type_of(data)
        if found:
            data["type"] = found
    template = data.get("template")
    if isinstance(template, dict) and isinstance(template.get("columns"), list):
        for index, column in enumerate(template["columns"]):
            if isinstance(column, dict):
                _column(column, index, findings)
    if foreign and isinstance(data.get("items"), list):
        data["items"] = _items(data["items"], findings)


def _from_jsonl(data: dict[str, Any], nested: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """`data.jsonl: {path, url, prompt_field, ...}` is `{type: jsonl, url, columns}`."""
    data["type"] = "jsonl"
    if nested.get("url") is not None and nested.get("path") is not None:
        nested.pop("path")
        findings.warn(("data", "jsonl", "path"), "is not used: the file is fetched by data.jsonl.url")
    for key, value in nested.items():
        role = _FIELD_NAMES.get(key)
        if role:
            columns = data.setdefault("columns", {})
            if isinstance(columns, dict):
                columns.setdefault(role, value)
                renamed["data", "columns", role] = ("data", "jsonl", key)
        else:
            data.setdefault(key, value)
            renamed["data", key] = ("data", "jsonl", key)


def _move(source: dict[str, Any], old: str, target: dict[str, Any], new: str, path: Path, findings: Findings) -> None:
    value = source.pop(old)
    if target.setdefault(new, value) != value:
        findings.add(path, f"and {new!r} are the same field, but say {show(value)} and {show(target[new])}; keep one")


def _type_of(data: Mapping[str, Any]) -> str | None:
    """Find the type of data from its other fields."""
    for field, kind in (
        ("items", "list"), ("messages", "list"), ("prompts", "prompts"), ("preferences", "preferences"),
        ("template", "graph_template"),
    ):  # fmt: skip
        if field in data:
            return kind
    for field in ("upload", "path", "url"):
        if isinstance(data.get(field), str):
            plain = re.sub(r"[?#].*", "", data[field])
            found = _SUFFIXES.get(PurePosixPath(plain).suffix.lower())
            if found:
                return found
            return "dataset" if field == "url" and "://" not in plain and "${" not in plain else "jsonl"
    return None


def _column(column: dict[str, Any], index: int, findings: Findings) -> None:
    """Turn `node` with `path`, or `expr`, into `value: ${...}`, so that one mechanism resolves it."""
    node, path, expr = column.get("node"), column.get("path"), column.get("expr")
    at = ("data", "template", "columns", index)
    if isinstance(expr, str) and "value" not in column:
        column["value"] = _reference(_with_result(expr.strip()), (*at, "expr"), findings)
        column.pop("expr")
    elif isinstance(node, str) and "value" not in column:
        column["value"] = _reference(_inside(node, path), (*at, "path" if path else "node"), findings)
        column.pop("node")
        column.pop("path", None)


def _items(given: list[Any], findings: Findings) -> Any:
    """Return items with `{node, path}` and `{expr}` as references; one over all rows of a stage is all the items."""
    items = [_node_item(item, index, findings) for index, item in enumerate(given)]
    for index, (before, now) in enumerate(zip(given, items, strict=True)):
        if now is not before and _ALL_ROWS.search(now):
            if len(items) == 1:
                return now
            findings.add(("data", "items", index), "is a list, of all rows of a stage; let it be the only item")
    return items


def _node_item(item: Any, index: int, findings: Findings) -> Any:
    """An item `{node, path}` or `{expr}` of a public template is a reference."""
    if not isinstance(item, dict):
        return item
    at = ("data", "items", index)
    if set(item) == {"node", "path"} and isinstance(item["node"], str):
        return _reference(_inside(item["node"], item["path"]), (*at, "path"), findings)
    if set(item) == {"expr"} and isinstance(item["expr"], str):
        return _reference(_with_result(item["expr"].strip()), (*at, "expr"), findings)
    return item


def _reference(inside: str, at: Path, findings: Findings) -> str:
    """Return the reference; what leads into no result is a mistake, or it would be sent to the model as text."""
    try:
        parse_reference(inside)
    except ValueError:
        findings.add(at, f"{show(inside)} leads into no result; write a stage and a path, as in ask.items[0].output")
        return ""
    return "${" + inside + "}"


def _inside(node: str, path: Any) -> str:
    inside = str(path).removeprefix("result.") if path else "items"
    return f"{node}.result" + (inside if inside.startswith("[") else f".{inside}" if inside else "")


def _with_result(expr: str) -> str:
    return expr if "." in expr or "[" in expr else f"{expr}.result"


def _sampling(section: dict[str, Any], findings: Findings, *, foreign: bool) -> None:
    """`do_sample: false` is temperature 0; `do_sample: true` wants a temperature above it."""
    if not isinstance(section.get("do_sample"), bool):
        return
    sample, temperature = section.pop("do_sample"), section.get("temperature")
    greedy = temperature in (0, 0.0, "0", "0.0")
    if sample and temperature is None:
        section["temperature"] = 1.0
    elif not sample and not greedy and temperature is not None and not foreign:
        findings.add(("inference", "do_sample"), f"is false, but temperature is {show(temperature)}; keep one of them")
    elif not sample:
        if not greedy and temperature is not None:
            findings.warn(("inference", "temperature"), "is not used: do_sample is false, so decoding is greedy")
        section["temperature"] = 0.0
    elif greedy:
        findings.add(("inference", "do_sample"), "is true, but temperature is 0; keep one of them")
