"""Turns a stage into the specs of its tasks: references, matrix, shards.

What an upstream stage gave may itself be a reference to a store (`artifacts.references`). A text that is one whole
reference passes it on as it is; whoever leads through it, or puts it into a longer text, has it loaded. The arguments
of a team's function are loaded too: it knows of no references but those that another function has returned. Those are
what that function means by them, such as a file that is no JSON, and are loaded only for whoever leads through them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import Reference, Stage, pick, shard
from gpuflow.spec.artifact_reference import is_reference
from gpuflow.spec.function_section import is_function
from gpuflow.spec.references import find_references, walk_references

#: Most tasks of one stage: the points of its matrix times their shards.
MAX_TASKS: Final = 4096

StageResult = Callable[[str], Mapping[str, Any]]
Load = Callable[[Any], Any]


def task_specs(
    stage: Stage, result_of: StageResult, load: Load, functions: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the canonical spec of each task of a stage, in order: matrix points first, then shards of each.

    `result_of` gives the result of an upstream stage, `load` what a reference to a store stands for; `functions` are
    the stages that call functions, which return what they like. Raises GPUFlowError (UnresolvedReference,
    InvalidTemplate, ArtifactError) with the path that has no value or does not fit.
    """
    in_texts, as_values = _in_texts(stage), _as_values(stage)
    found_at = lookup_of(result_of, load, loaded=False)
    for_function = is_function(stage.spec)

    def lookup(reference: Reference) -> Any:
        value = found_at(reference)
        if reference.stage in functions:
            return load(value) if reference.text in as_values else value
        if for_function:
            return _whole(value, reference.path, load)
        return load(value) if reference.text in in_texts | as_values else value

    found: list[dict[str, Any]] = []
    try:
        specs = stage.tasks(lookup)
    except RecursionError:
        raise InvalidTemplate(f"stage {stage.name!r}: a value that it refers to nests too deeply") from None
    for spec in specs:
        found += shard(spec)
        if len(found) > MAX_TASKS:
            raise InvalidTemplate(
                f"stage {stage.name!r} makes more than {MAX_TASKS} tasks; give its matrix fewer values, or fewer shards"
            )
    return found


def lookup_of(
    result_of: StageResult, load: Load, functions: Collection[str] = (), *, loaded: bool = True
) -> Callable[[Reference], Any]:
    """Return what gives the value of a reference, `loaded` even where it only refers to a store.

    What `functions` have returned is given as it is.
    """

    def lookup(reference: Reference) -> Any:
        value = pick(_opened(result_of(reference.stage), reference.path, load), reference)
        return load(value) if loaded and reference.stage not in functions else value

    return lookup


def _whole(value: Any, path: Sequence[str | int], load: Load) -> Any:
    """Return what `path` leads to in what gpuflow stored, as if it had been small.

    It is a result, or a field of one. Of several tasks, `results` holds a result each: it may be all of these, or a
    field of each.
    """
    steps = list(path)
    if steps[:1] == ["results"] and isinstance(value, list):
        if len(steps) == 1:
            return [_fields(one, load) for one in value]
        if len(steps) == 2 and isinstance(steps[1], str):
            return [load(one) for one in value]
    if isinstance(value, Mapping) and not is_reference(value):
        loaded = _fields(value, load)
        several = None if steps else loaded.get("results")
        return {**loaded, "results": [_fields(one, load) for one in several]} if isinstance(several, list) else loaded
    return load(value)


def _fields(value: Any, load: Load) -> Any:
    """Return a mapping with its fields loaded; any other value as it is."""
    return {key: load(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _in_texts(stage: Stage) -> set[str]:
    """Return the references that stand inside longer texts."""
    return {
        reference.text
        for place in (stage.spec, stage.matrix or {})
        for path, reference in walk_references(place)
        if isinstance(reference, Reference) and _text_at(place, path) != reference.text
    }


def _as_values(stage: Stage) -> set[str]:
    """Return the references whose value itself is needed here: of a graph template, and for all values of a matrix."""
    in_template = {reference.text for reference in find_references((stage.spec.get("data") or {}).get("template"))}
    return in_template | {
        one.text
        for values in (stage.matrix or {}).values()
        if isinstance(values, str)
        for one in find_references(values)
    }


def _text_at(value: Any, path: Sequence[str | int]) -> str:
    for step in path:
        value = value[step]
    return str(value)


def _opened(value: Any, path: Sequence[str | int], load: Load) -> Any:
    """Return a value in which no reference is left on the way along `path`."""
    if not path:
        return value
    value, step = load(value), path[0]
    if isinstance(value, Mapping) and str(step) in value:
        return {**value, str(step): _opened(value[str(step)], path[1:], load)}
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        inner = _opened(value[step], path[1:], load)
        return value if inner is value[step] else [*value[:step], inner, *value[step + 1 :]]
    if isinstance(value, list) and isinstance(step, str):
        return _opened_in_each(value, step, path[1:], load)
    return value


def _opened_in_each(value: list[Any], step: str, path: Sequence[str | int], load: Load) -> list[Any]:
    """Return a list of which `step` names a field of every entry, as `_opened` does."""
    rows = [load(row) for row in value]
    if not all(isinstance(row, Mapping) and step in row for row in rows):
        return rows
    fields = _opened([row[step] for row in rows], path, load)
    return [row if row[step] is field else {**row, step: field} for row, field in zip(rows, fields, strict=True)]
