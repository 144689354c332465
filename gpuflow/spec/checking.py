"""Checks one task spec whole, and gives its canonical form.

`canonical` is for everyone: at submit for a single task, and at dispatch of a stage, when its references have values.
`check_spec` is for `stages`, which calls it while references are still in place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from gpuflow.protocol import FUNCTION_TYPE, is_user_type
from gpuflow.spec.combinations import check_combinations
from gpuflow.spec.fields import check_section
from gpuflow.spec.function_section import INSTEAD, check_function
from gpuflow.spec.graph_template import check_template, render
from gpuflow.spec.models_task import TaskSpec
from gpuflow.spec.multimodal import check_multimodal
from gpuflow.spec.normalise import normalise
from gpuflow.spec.plain_secrets import check_plain_secrets
from gpuflow.spec.policy_tuning import check_ppo
from gpuflow.spec.pydantic_report import report
from gpuflow.spec.ranks import check_ranks
from gpuflow.spec.reading import read_mapping
from gpuflow.spec.references import is_pending, walk_references
from gpuflow.spec.report import Findings, Path, Renames, one_of, show, suggest
from gpuflow.spec.results_out import check_destination
from gpuflow.spec.retrieval import check_retrieval
from gpuflow.spec.sections import (
    ENGINE,
    INFERENCE,
    LORA,
    NEEDS,
    TASK_TYPES,
    TRAINING_SCHEMAS,
    USED_BY,
    is_used,
    training_section,
)
from gpuflow.spec.sharding import check_parallel
from gpuflow.spec.structured import check_structured

#: Longest path of unknown fields that are taken out one after the other before giving up.
_MAX_PASSES: Final = 4
#: Type of a place that weights or an index are fetched from -> the field that says where it is.
_PLACES: Final = {"http": "url", "s3": "url", "path": "path", "local": "path"}
#: Sections that earlier versions took of every task type: pipelines that they have stored go on.
_ONCE_COMMON: Final = ("model", "data")
#: Sections of which one field is what a task needs.
_SHOWN: Final = {"model": "model.source", "embedding": "embedding.model"}


def canonical(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the canonical form of a task spec, complete and checked: only the fields that were set, in the template's
    spelling, the fields of libraries under the libraries' own names, numbers as numbers.

    References to stages must have been resolved; `${env:NAME}` stays for the child. Applying it twice changes nothing.
    Raises InvalidTemplate with every mistake.
    """
    document = read_mapping(spec, "task")
    findings = Findings(locate=lambda path: ("spec", *path))
    done = check_spec(document.data, findings, foreign=False, at_dispatch=True)
    findings.raise_if_any("task")
    return done


def check_spec(
    given: Mapping[str, Any], findings: Findings, *, foreign: bool, at_dispatch: bool = False
) -> dict[str, Any]:
    """Return `given` in canonical form, as far as references and mistakes allow; notes what is wrong in `findings`.

    `foreign` (flowmesh/v1, mloc/v1) takes unknown fields out with a warning each.
    """
    spec = {key: copy.deepcopy(value) for key, value in given.items() if value is not None}
    renamed = normalise(spec, findings, foreign=foreign)
    findings = findings.within(_through(findings, renamed))
    check_multimodal(spec, findings)
    check_destination(spec, findings)
    task_type = _task_type(spec, findings)
    if task_type is not None:
        _check_use(spec, task_type, findings, foreign=foreign, at_dispatch=at_dispatch)
        _check_needs(spec, task_type, findings)
        _warn_of_unused(spec, findings)
        check_retrieval(spec, task_type, findings)
    _library_sections(spec, task_type, findings, foreign=foreign, at_dispatch=at_dispatch)
    check_structured(spec, findings)
    if task_type is not None and not at_dispatch:  # a stored spec was looked at when it was submitted
        check_combinations(spec, task_type, findings, foreign=foreign)
    if task_type == "ppo":
        check_ppo(spec, findings)
    elif task_type == FUNCTION_TYPE:
        check_function(spec, findings, at_dispatch=at_dispatch)
    if task_type in TRAINING_SCHEMAS:
        check_ranks(spec, findings)
    elif isinstance(spec.get("checkpoint"), dict) and spec["checkpoint"].get("merge_first") is not None:
        findings.add(("checkpoint", "merge_first"), f"is for trainings that begin from an adapter, not for {task_type}")
    is_right = _check_template(spec, findings)
    if at_dispatch:
        if is_right:
            _render_template(spec, findings)
    else:
        check_plain_secrets(spec, findings, foreign=foreign)
    known = len(findings.mistakes)
    done = _validate(spec, findings, foreign=foreign, at_dispatch=at_dispatch)
    _check_further(done, findings, known)
    if task_type is not None:
        check_parallel(done, findings, at_dispatch=at_dispatch)
    return done


def _through(findings: Findings, renamed: Renames) -> Any:
    """Map a path of the rewritten spec to where the user wrote it."""

    def locate(path: Path) -> Path:
        for length in range(len(path), 0, -1):
            old = renamed.get(path[:length])
            if old is not None:
                return findings.locate((*old, *path[length:]))
        return findings.locate(path)

    return locate


def _task_type(spec: dict[str, Any], findings: Findings) -> str | None:
    task_type = spec.get("taskType")
    if task_type is None:
        findings.add(("taskType",), f"is required and missing; give {one_of(TASK_TYPES)}")
        spec["taskType"] = "echo"
        return None
    if task_type not in TASK_TYPES and not is_user_type(task_type):
        near = suggest(task_type, TASK_TYPES) if isinstance(task_type, str) else ""
        others = "or the owner.name of a user's own"
        findings.add(("taskType",), f"is {show(task_type)}; it must be {one_of(TASK_TYPES)}, {others}{near}")
        spec["taskType"] = "echo"
        return None
    return str(task_type)


def _check_use(spec: dict[str, Any], task_type: str, findings: Findings, *, foreign: bool, at_dispatch: bool) -> None:
    for section in [name for name in spec if not is_used(name, task_type)]:
        if at_dispatch and section in _ONCE_COMMON and task_type != FUNCTION_TYPE:
            continue
        if task_type == FUNCTION_TYPE and section in INSTEAD:
            instead = f"{INSTEAD[section]} (a stage below a base that has it: {section}: null)"
        elif section in USED_BY:
            users = one_of(sorted(USED_BY[section])) if USED_BY[section] else "users' own task types (owner.name)"
            instead = f"it belongs to {users}"
        else:
            continue
        message = f"is not used by taskType {task_type}; {instead}"
        if foreign and findings.takes_any:
            findings.warn((section,), message)
            del spec[section]
        else:
            findings.add((section,), message)


def _check_needs(spec: dict[str, Any], task_type: str, findings: Findings) -> None:
    for need in NEEDS.get(task_type, ()):
        choice = (need,) if isinstance(need, str) else need
        if not any(_has(spec, section) for section in choice):
            what = one_of(_SHOWN.get(name, name) for name in choice)
            findings.add((choice[0],), f"is missing: taskType {task_type} needs {what}")


def _warn_of_unused(spec: Mapping[str, Any], findings: Findings) -> None:
    """Say what is read and changes nothing; that the author has counted on it is for them to tell."""
    if spec.get("sloSeconds") is not None:
        findings.warn(("sloSeconds",), "is not used: no task is put before others for it; give priority, or timeout")
    data = spec.get("data")
    if isinstance(data, Mapping) and data.get("trust_remote_code"):
        findings.warn(("data", "trust_remote_code"), "is not used: the code of a data set is never run")
    for section, name in (("checkpoint", "load"), ("search", "index")):
        holder = spec.get(section)
        load = holder.get(name) if isinstance(holder, Mapping) else None
        place = _PLACES.get(str(load.get("type"))) if isinstance(load, Mapping) else None
        if isinstance(load, Mapping) and place is not None and load.get(place) is None:
            findings.warn(
                (section, name, "type"), f"is not used: {load['type']} is named by {place}, and none is given"
            )
    model = spec.get("model")
    adapters = model.get("adapters") if isinstance(model, Mapping) else None
    for index, adapter in enumerate(adapters if isinstance(adapters, list) else ()):
        if isinstance(adapter, Mapping) and adapter.get("name") is not None:
            findings.warn(("model", "adapters", index, "name"), "is not used: an adapter is known by its path or url")


def _has(spec: Mapping[str, Any], section: str) -> bool:
    """Whether a section is there; a model may also come whole from a checkpoint."""
    value = spec.get(section)
    if section == "embedding":
        return value is not None and (not isinstance(value, dict) or value.get("model") is not None)
    if section != "model":
        return value is not None
    return bool(spec.get("checkpoint")) or (value is not None and (not isinstance(value, dict) or "source" in value))


def _library_sections(
    spec: dict[str, Any], task_type: str | None, findings: Findings, *, foreign: bool, at_dispatch: bool
) -> None:
    model = spec.get("model")
    places: list[tuple[Path, Any, Any]] = [
        (("inference",), spec, INFERENCE),
        (("lora",), spec, LORA),
        (("model", "vllm"), model, ENGINE),
    ]
    if task_type is not None and task_type in TRAINING_SCHEMAS:
        places.append((("training",), spec, training_section(task_type)))
    for path, holder, section in places:
        given = holder.get(path[-1]) if isinstance(holder, dict) else None
        if isinstance(given, dict):
            holder[path[-1]] = check_section(given, section, path, findings, lenient=foreign, at_dispatch=at_dispatch)


def _check_template(spec: Mapping[str, Any], findings: Findings) -> bool:
    """Note what is wrong with a graph template, and say whether nothing is."""
    data = spec.get("data")
    template = data.get("template") if isinstance(data, Mapping) else None
    is_right = True
    for path, message in check_template(template) if isinstance(template, Mapping) else ():
        is_right = False
        findings.add(("data", "template", *path), message)
        if findings.full:
            break
    return is_right


def _check_further(spec: Mapping[str, Any], findings: Findings, known: int) -> None:
    """Run the checks that layers above this package bring, on parts in which nothing is wrong so far."""
    wrong = [mistake.path for mistake in findings.mistakes[known:]]
    for name, check in findings.checks.items():
        value = spec.get(name)
        if value is None or any(True for _ in walk_references(value)) or any(name in path for path in wrong):
            continue
        for path, message in check(value):
            findings.add((name, *path), message)


def _render_template(spec: dict[str, Any], findings: Findings) -> None:
    """Replace a graph template whose values are known by the list of its prompts."""
    data = spec.get("data")
    if not isinstance(data, dict) or data.get("type") != "graph_template" or not isinstance(data.get("template"), dict):
        return
    try:
        items = render(data["template"])
    except (ValueError, KeyError, TypeError) as error:
        findings.add(("data", "template", "columns"), str(error) if isinstance(error, ValueError) else "lack a label")
        return
    kept = {key: value for key, value in data.items() if key in ("max_items", "shuffle", "seed", "shard")}
    spec["data"] = {"type": "list", "items": items, **kept}


def _validate(spec: dict[str, Any], findings: Findings, *, foreign: bool, at_dispatch: bool) -> dict[str, Any]:
    for _ in range(_MAX_PASSES):
        try:
            model = TaskSpec.model_validate(spec)
        except ValidationError as error:
            wrong, unknown = report(
                error, TaskSpec, findings, lambda value: is_pending(value, at_dispatch=at_dispatch), lenient=foreign
            )
            for path in unknown:
                _remove(spec, path)
            if wrong or not unknown:
                return spec
        else:
            return _without_nulls(model.model_dump(mode="json", exclude_unset=True, by_alias=True))
    return spec


def _without_nulls(dumped: dict[str, Any]) -> dict[str, Any]:
    """Leave out top-level fields that a stage has set to null: they are unset."""
    return {key: value for key, value in dumped.items() if value is not None}


def _remove(spec: Any, path: Path) -> None:
    for part in path[:-1]:
        spec = spec[part]
    if isinstance(spec, dict):
        spec.pop(str(path[-1]), None)
