"""Puts the results of a stage's tasks together, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpuflow.errors import ResultGone
from gpuflow.ledger.records import TaskRecord
from gpuflow.spec.artifact_reference import is_reference, read_reference
from gpuflow.spec.function_section import is_function
from gpuflow.spec.sharding import ROW_TYPES, shard_range

#: What results say of what was not used, and of what is missing.
_TOLD: Final = ("warnings", "missing_artifacts")
_ASKED: Final = ("index", "count")
_SEEN: Final = (*_ASKED, "start", "end", "total")


def all_found(stage: str, tasks: Sequence[TaskRecord | None]) -> list[TaskRecord]:
    """Return the records of a stage's tasks. Raises ResultGone where one is missing: its rows would be, too."""
    found = [task for task in tasks if task is not None]
    if len(found) < len(tasks):
        raise ResultGone(
            f"stage {stage!r}: the records of {len(tasks) - len(found)} of its {len(tasks)} tasks are gone from Redis, "
            f"and their results with them; submit the pipeline again"
        )
    return found


def result_of_tasks(
    tasks: Sequence[TaskRecord], results: Sequence[Mapping[str, Any]], load: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the result of a stage whose tasks have given `results`, as `stage_result` does.

    Of a function: what it returns is nobody's to look into. Several tasks give `results` alone. One whose argument is
    split (`function.rows`) gives `items` too, where each part is a list, into however few parts it was.
    """
    if not tasks or not is_function(tasks[0].spec):
        return stage_result(results, load)
    is_split = (tasks[0].spec.get("function") or {}).get("rows") is not None
    if len(results) == 1 and not is_split:
        return dict(results[0])
    values = [result.get("value") for result in results]
    items = [item for value in values if isinstance(value, list) for item in value]
    is_whole = is_split and all(isinstance(value, list) for value in values)
    return {
        **(results[0] if len(results) == 1 else {}),
        "results": [dict(result) for result in results],
        **({"items": items} if is_whole else {}),
    }


def stage_result(results: Sequence[Mapping[str, Any]], load: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the result of a stage from those of its tasks, in the order of its shards or matrix.

    One task: its own result. Several: `results` holds each, `items` all their items in order (numbered anew),
    `usage` the sums of its numbers, `warnings` and `missing_artifacts` what any of them tells. `load` gives what a
    reference stands for, and any other value as it is. Raises what `load` raises.
    """
    if len(results) == 1:
        return dict(results[0])
    joined: dict[str, Any] = {"results": [dict(result) for result in results]}
    several = [load(result.get("items")) for result in results]
    if all(isinstance(items, list) for items in several):
        of_result = [(number, item) for number, items in enumerate(several) for item in items]
        joined["items"] = [_joined_item(item, index, number) for index, (number, item) in enumerate(of_result)]
    usages = [result["usage"] for result in results if isinstance(result.get("usage"), Mapping)]
    if usages:
        joined["usage"] = summed(usages)
    for name in _TOLD:
        told = [one for result in results if isinstance(result.get(name), list) for one in result[name]]
        if told:
            joined[name] = list(dict.fromkeys(map(str, told)))
    return joined


def _joined_item(item: Any, index: int, result: int) -> Any:
    """Return an item with its index in the whole. A vector in a file says whose file: that of `results[result]`."""
    if not isinstance(item, Mapping):
        return item
    vector = item.get("embedding")
    in_file = {"embedding": {**vector, "result": result}} if isinstance(vector, Mapping) else {}
    return {**item, "index": index, **in_file}


def summed(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of all numbers, those in mappings too; of what is no number, that on which all agree."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for usage in usages for name in usage):
        values = [usage[name] for usage in usages if usage.get(name) is not None]
        if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            total[name] = sum(values)
        elif values and all(isinstance(value, Mapping) for value in values):
            total[name] = summed(values)
        elif values and all(value == values[0] for value in values):
            total[name] = values[0]
    return total


def shard_problem(tasks: Sequence[TaskRecord]) -> str | None:
    """Return why the shards among a stage's tasks, which are in order and have all succeeded, do not make up the whole.

    None where they do: every shard is there once, all of them saw the same rows, their ranges tile these, and each has
    one item for each of its rows (of the task types that give one).
    """
    expected = 0
    first: Mapping[str, Any] = {}
    for task in tasks:
        asked = _shard_of(task.spec.get("data"), _ASKED)
        if asked is None:
            if expected:
                return f"shard {expected} of {first.get('count')} is missing"
            continue
        seen = _shard_of(task.result, _SEEN)
        if seen is None:
            return (
                f"task {task.id} does not say which rows it had; its worker runs another version of gpuflow, or its "
                "executor does not take data.shard; update that worker"
            )
        if asked["index"] != expected or {**seen, **asked} != seen:
            return f"task {task.id} is not shard {expected} of {asked['count']}: {dict(seen)}"
        first = seen if expected == 0 else first
        problem = _differs(first, seen, task.id) or _miscounted(seen, task)
        if problem:
            return problem
        expected = (expected + 1) % asked["count"]
    return f"shard {expected} of {first.get('count')} is missing" if expected else None


def _differs(first: Mapping[str, Any], seen: Mapping[str, Any], task_id: str) -> str | None:
    if (first.get("total"), first.get("digest")) != (seen.get("total"), seen.get("digest")):
        what = "other rows" if first.get("total") == seen.get("total") else f"{seen.get('total')} rows"
        return (
            f"the data changed between its shards: shard 0 saw {first.get('total')} rows, shard {seen['index']} (task "
            f"{task_id}) {what}; give all workers the same data, by data.upload or a revision, and resume the pipeline"
        )
    if (seen.get("start"), seen.get("end")) != shard_range(seen["total"], seen["index"], seen["count"]):
        return f"task {task_id} had rows {seen.get('start')} to {seen.get('end')}, which is not its share: {dict(seen)}"
    return None


def _miscounted(seen: Mapping[str, Any], task: TaskRecord) -> str | None:
    items = (task.result or {}).get("items")
    count = len(items) if isinstance(items, list) else read_reference(items).count if is_reference(items) else None
    rows = seen["end"] - seen["start"]
    if task.task_type not in ROW_TYPES or count is None or count == rows:
        return None
    return f"task {task.id} gave {count} items for its {rows} rows ({seen['start']} to {seen['end']})"


def _shard_of(holder: Any, needed: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the entry `shard` of a data section or a result; None for none, and for what is no shard."""
    found = holder.get("shard") if isinstance(holder, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    return found if all(isinstance(found.get(name), int) and found[name] >= 0 for name in needed) else None
