"""Turns a stage into the specs of its tasks: references, matrix, shards.

What an upstream stage gave may itself be a reference to a store (`artifacts.references`). A text that is one whole
reference passes it on as it is; whoever leads through it, or puts it into a longer text, has it loaded. The arguments
of a team's function are loaded too: it knows of no references but those that another function has returned.
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
    needed = _needed_values(stage)
    found_at = lookup_of(result_of, load, loaded=False)
    for_function = is_function(stage.spec)

    def lookup(reference: Reference) -> Any:
        value = found_at(reference)
        if for_function and reference.stage not in functions:
            return _whole(value, load)
        return load(value) if reference.text in needed else value

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


def lookup_of(result_of: StageResult, load: Load, *, loaded: bool = True) -> Callable[[Reference], Any]:
    """Return what gives the value of a reference, `loaded` even where it only refers to a store."""

    def lookup(reference: Reference) -> Any:
        value = pick(_opened(result_of(reference.stage), reference.path, load), reference)
        return load(value) if loaded else value

    return lookup


def _whole(value: Any, load: Load) -> Any:
    """Return what gpuflow stored of a result, or a result with its fields, as if it had been small."""
    if isinstance(value, Mapping) and not is_reference(value):
        return {key: load(item) for key, item in value.items()}
    return load(value)


def _needed_values(stage: Stage) -> set[str]:
    """Return the references whose value itself is needed here: inside longer texts, and in a graph template."""
    needed = {
        reference.text
        for place in (stage.spec, stage.matrix or {})
        for path, reference in walk_references(place)
        if isinstance(reference, Reference) and _text_at(place, path) != reference.text
    }
    needed |= {reference.text for reference in find_references((stage.spec.get("data") or {}).get("template"))}
    return needed | {
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
    return value
