"""What the sections of a rag task need of each other: it makes an index, or it asks one of three sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Findings, Path, show

#: Where passages are looked for.
_SOURCES: Final[tuple[Path, ...]] = (("search", "index"), ("search", "documents"), ("qdrant",))


def check_retrieval(spec: Mapping[str, Any], task_type: str, findings: Findings) -> None:
    """Note what contradicts, or is missing, in a rag task; and documents where another task has its data."""
    data = spec.get("data")
    is_documents = isinstance(data, Mapping) and data.get("type") == "documents"
    if task_type != "rag":
        if is_documents:
            findings.add(("data", "type"), f"is 'documents', which taskType rag reads; {task_type} needs rows")
        if _at(spec, ("embedding", "passage_prefix")) is not None:
            findings.add(("embedding", "passage_prefix"), "is of taskType rag; put it before the texts themselves")
        return
    if spec.get("engine") == "vllm":
        findings.add(
            ("engine",),
            "is 'vllm', which runs no retrieval; leave model out, and let a stage of taskType inference answer its "
            "items on vLLM",
        )
    if spec.get("index") is not None:
        _check_ingest(spec, findings)
    else:
        _check_query(spec, findings, is_documents=is_documents)


def _check_ingest(spec: Mapping[str, Any], findings: Findings) -> None:
    for name in ("query", "search", "qdrant"):
        if spec.get(name) is not None:
            findings.add((name,), "belongs to a task that asks, and `index` makes one that only makes an index")
    if spec.get("data") is None and spec.get("query") is not None:
        findings.add(("data",), "is missing: `index` needs documents")
    if _at(spec, ("parallel", "enabled")):
        findings.add(("parallel",), "splits the data over tasks, and `index` makes one index; leave it out")
    _check_model(spec, findings)


def _check_query(spec: Mapping[str, Any], findings: Findings, *, is_documents: bool) -> None:
    if spec.get("data") is not None and spec.get("query") is not None:
        findings.add(("query",), "and data both hold questions; keep one of them")
    if is_documents:
        findings.add(("data", "type"), "is 'documents', and a task that asks needs questions; add `index: {}`")
    given = [path for path in _SOURCES if _at(spec, path) is not None]
    if not given:
        findings.add(("search",), "is missing: a task that asks needs search.index, search.documents or qdrant")
    elif len(given) > 1:
        both = " and ".join(".".join(map(str, path)) for path in given)
        findings.add(given[1], f"is one source too many: {both}; keep one of them")
    if _at(spec, ("search", "chunks")) is not None and _at(spec, ("search", "documents")) is None:
        findings.add(("search", "chunks"), "cuts search.documents, and there are none")
    if given != [("search", "index")]:  # which names its model itself
        _check_model(spec, findings)
    model = spec.get("model")
    has_model = spec.get("checkpoint") is not None or (isinstance(model, Mapping) and model.get("source") is not None)
    if spec.get("inference") is not None and not has_model:
        findings.warn(("inference",), "is not used: without model.source the passages are the result")


def _check_model(spec: Mapping[str, Any], findings: Findings) -> None:
    section = spec.get("embedding")
    if not isinstance(section, Mapping) or section.get("model") is None:
        what = "" if section is None or isinstance(section, Mapping) else f" ({show(section)} is no section)"
        findings.add(("embedding", "model"), f"is required and missing{what}")


def _at(spec: Mapping[str, Any], path: Path) -> Any:
    value: Any = spec
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
