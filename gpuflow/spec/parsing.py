"""`parse` and `parse_text`: from a path, a name, text or a mapping to a checked Template.

The entry of this package; cli, client and gateway call it. All mistakes of a template come in one InvalidTemplate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic import ValidationError

from gpuflow.errors import GPUFlowError
from gpuflow.spec.checking import check_spec
from gpuflow.spec.models_task import Metadata
from gpuflow.spec.presets import list_presets, preset_document
from gpuflow.spec.pydantic_report import report
from gpuflow.spec.reading import MAX_BYTES, Document, missing, read_file, read_mapping, read_text
from gpuflow.spec.report import Check, Findings, Path, one_of, show, suggest
from gpuflow.spec.stages import build_stages, collect_references
from gpuflow.spec.template import Stage, Template

#: apiVersion -> whether it is another project's, where unknown fields are warnings.
API_VERSIONS: Final = {"gpuflow/v1": False, "flowmesh/v1": True, "mloc/v1": True}
#: The one whose programs pass over fields that they do not know, wherever they stand.
_TAKES_ANY: Final = "mloc/v1"
_TOP: Final = ("apiVersion", "kind", "metadata", "spec")


def parse(
    source: str | os.PathLike[str] | Mapping[str, Any] | Template,
    *,
    max_bytes: int = MAX_BYTES,
    checks: Mapping[str, Check] | None = None,
) -> Template:
    """Return the checked template of a file, a shipped pipeline's name, or a mapping; a Template comes back as it is.

    `max_bytes` limits what is read of a file. A mapping without `spec` is taken as a bare task spec. `checks` look at
    sections of each task; `gpuflow.templates` gives those of the library. Raises InvalidTemplate with one report of
    every mistake and warning.
    """
    if isinstance(source, Template):
        return source
    checks = checks or {}
    if isinstance(source, Mapping):
        return _template(read_mapping(source), checks)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"a template is a path, a name, a mapping or a Template, not a {type(source).__name__}")
    name = os.fspath(source)
    path = FilePath(name)
    if name and _exists(path):
        return _template(read_file(path, max_bytes), checks)
    shipped = list_presets("pipelines")
    if isinstance(source, str) and name in shipped:
        return _template(preset_document("pipelines", name), checks)
    raise missing(name, shipped, "shipped templates")


def parse_text(
    text: str, name: str = "template", *, max_bytes: int = MAX_BYTES, checks: Mapping[str, Check] | None = None
) -> Template:
    """Return the checked template of YAML or JSON text; `name` stands in reports. Raises InvalidTemplate."""
    return _template(read_text(text, name, max_bytes=max_bytes), checks or {})


def _exists(path: FilePath) -> bool:
    try:
        return os.path.lexists(path)
    except (OSError, ValueError):
        return False


def _template(document: Document, checks: Mapping[str, Check]) -> Template:
    findings = Findings(line_of=document.line_of, checks=checks)
    try:
        template = _build(document, findings)
    except RecursionError:  # pragma: no cover - depth is limited when reading; a net, not a path
        findings.add((), "nests too deep; flatten it")
        template = None
    findings.raise_if_any(document.name)
    if template is None:
        raise GPUFlowError(f"{document.name}: a template without mistakes gave no stages")
    return template


def _build(document: Document, findings: Findings) -> Template | None:
    data = document.data
    if not isinstance(data, dict):
        findings.add((), f"is {show(data)}; a template is a mapping with apiVersion, metadata and spec")
        return None
    bare = "spec" not in data and any(key in data for key in ("taskType", "stages", "graph"))
    top = {"apiVersion": "gpuflow/v1", "spec": data} if bare else data
    spec_at: Path = () if bare else ("spec",)
    foreign = _check_top(top, findings)
    spec = top.get("spec")
    if not isinstance(spec, dict):
        findings.add(("spec",), "is required and missing" if spec is None else f"is {show(spec)}; it must be a mapping")
        return None
    metadata = _metadata(top.get("metadata"), findings, foreign=foreign)
    name = metadata.get("name")
    base = {key: value for key, value in spec.items() if key not in ("stages", "graph")}
    is_pipeline = "stages" in spec or "graph" in spec
    if is_pipeline:
        stages = _pipeline(spec, base, spec_at, findings, foreign=foreign)
    else:
        stages = (_single(base, spec_at, name, findings, foreign=foreign),)
    if findings.mistakes:
        return None
    return Template(
        api_version=str(top["apiVersion"]),
        kind=None if top.get("kind") is None else str(top["kind"]),
        metadata=metadata,
        spec=base,
        stages=stages,
        is_pipeline=is_pipeline,
        warnings=tuple(findings.warnings),
        filled=tuple(findings.filled),
        source=document.name,
    )


def _check_top(top: dict[str, Any], findings: Findings) -> bool:
    """Check the fields around the spec; returns whether the template is another project's."""
    version = top.get("apiVersion")
    foreign = API_VERSIONS.get(version, False) if isinstance(version, str) else False
    findings.takes_any = version == _TAKES_ANY
    if version is None:
        findings.add(("apiVersion",), "is required and missing; write apiVersion: gpuflow/v1")
    elif version not in list(API_VERSIONS):
        near = suggest(version, API_VERSIONS)
        findings.add(("apiVersion",), f"is {show(version)}; it must be {one_of(API_VERSIONS)}{near}")
    kind = top.get("kind")
    if kind is not None and (not isinstance(kind, str) or len(kind) > 200):
        findings.add(("kind",), f"is {show(kind)}; it must be text, such as Pipeline")
    for key in top:
        if key in _TOP:
            continue
        near = suggest(key, _TOP)
        message = f"unknown field{near or f'; the fields here are {one_of(_TOP)}'}"
        if findings.takes_any and not near:
            findings.warn((key,), f"{message}; it is not used")
        else:
            findings.add((key,), message)
    return foreign


def _metadata(given: Any, findings: Findings, *, foreign: bool) -> dict[str, Any]:
    if given is None:
        return {}
    inside = findings.within(lambda path: findings.locate(("metadata", *path)))
    for _ in range(2):
        try:
            return Metadata.model_validate(given).model_dump(mode="json", exclude_unset=True)
        except ValidationError as error:
            wrong, unknown = report(error, Metadata, inside, lambda value: False, lenient=foreign)
            if wrong:
                break
            given = {key: value for key, value in given.items() if (key,) not in unknown}
    return {}


def _pipeline(
    spec: dict[str, Any], base: dict[str, Any], spec_at: Path, findings: Findings, *, foreign: bool
) -> tuple[Stage, ...]:
    if "stages" in spec and "graph" in spec:
        findings.add((*spec_at, "graph"), "and stages are both given; keep one of them")
        return ()
    at: Path = (*spec_at, "stages")
    entries = spec.get("stages")
    if "graph" in spec:
        graph = spec["graph"]
        at = (*spec_at, "graph", "nodes")
        if not isinstance(graph, dict) or set(graph) - {"nodes"}:
            findings.add((*spec_at, "graph"), f"is {show(graph)}; it must be a mapping with nodes alone")
            return ()
        entries = graph.get("nodes")
    if not isinstance(entries, list):
        findings.add(at, f"is {show(entries)}; it must be a list of stages, each with name and spec")
        return ()
    return build_stages(entries, at, base, spec_at, findings, linear="stages" in spec, foreign=foreign)


def _single(base: dict[str, Any], spec_at: Path, name: Any, findings: Findings, *, foreign: bool) -> Stage:
    inside = findings.within(lambda path: findings.locate((*spec_at, *path)))
    given = dict(base)
    if foreign and "dependsOn" in given:
        inside.warn(("dependsOn",), "is not used: a single task depends on no stage")
        del given["dependsOn"]
    spec = check_spec(given, inside, foreign=foreign)
    spec, references = collect_references(spec, inside, foreign=foreign)
    located = findings.within(lambda where: where)
    for path, reference in references:
        if findings.full:
            break
        located.add(
            path,
            f"{reference}: a single task has no stages to refer to; for the text itself write $${reference.text[1:]}",
        )
    return Stage(name=str(name or spec["taskType"]), spec=spec)
