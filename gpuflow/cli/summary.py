"""The results of a run, for people and as JSON: a few lines for each stage, and answers side by side.

What is shown of a result follows its shape (items, losses, folders), not its task type, so that executors of users are
shown as ours are. Two inference stages with the same inputs, or those that the annotation `gpuflow/compare: a,b` names,
are put side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.terminal import duration, one_line

if TYPE_CHECKING:
    from gpuflow.artifacts.references import References
    from gpuflow.client import PipelineRun
    from gpuflow.ledger.records import TaskRecord
    from gpuflow.pipelines.records import PipelineRecord

COMPARE: Final = "gpuflow/compare"
#: Rows of one table, unless all are asked for.
_MOST_ROWS: Final = 20
_CELL: Final = 600
_MOST_WARNINGS: Final = 10


@dataclass(kw_only=True)
class StageSummary:
    """One stage: how it ended, its result (None unless it succeeded), and the result folders of its tasks."""

    name: str
    state: str
    task_type: str = ""
    seconds: float | None = None
    result: Mapping[str, Any] | None = None
    error: str = ""
    folders: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    @property
    def items(self) -> list[Mapping[str, Any]]:
        """The rows of its result that have an output."""
        found = (self.result or {}).get("items")
        if not isinstance(found, list):
            return []
        return [item for item in found if isinstance(item, Mapping) and "output" in item]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table with a title."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def collect(run: PipelineRun) -> list[StageSummary]:
    """Read how the stages of a pipeline are."""
    from gpuflow.artifacts.references import References
    from gpuflow.client import reachable
    from gpuflow.pipelines.collect import result_of_tasks

    record: PipelineRecord = run.record()
    from gpuflow.artifacts.task_access import client_hosts

    references = References(run.app.settings, hosts=client_hosts(run.app.settings))
    found = []
    for stage in run.template().stages:
        kept = record.stage(stage.name)
        with reachable():
            tasks = [task for task in run.app.ledger.find_many(kept.tasks) if task is not None]
        results = [shown_result(task, references) for task in tasks]
        done = str(kept.state) == "SUCCEEDED"
        begun = min((task.started_at for task in tasks if task.started_at), default=kept.started_at)
        found.append(
            StageSummary(
                name=stage.name,
                state=str(kept.state),
                task_type=stage.task_type,
                seconds=kept.finished_at - begun if kept.finished_at and begun else None,
                result=result_of_tasks(tasks, results, lambda value: value) if done and results else None,
                error=str((kept.error or {}).get("message", "")) or kept.reason or "",
                folders=[_home(result) for result in results if result.get("result_dir")],
                tasks=list(kept.tasks),
            )
        )
    return found


def shown_result(record: TaskRecord, references: References) -> dict[str, Any]:
    """Return a result with its large fields loaded; as it is, with a note, when they cannot be.

    That of a function is as the function has returned it.
    """
    from gpuflow.cli.output import note
    from gpuflow.errors import ArtifactError

    result = record.result or {}
    if record.task_type == FUNCTION_TYPE:
        return dict(result)
    try:
        return dict(references.fields(result))
    except ArtifactError as error:
        note(f"gpuflow: a large field of the result is not shown: {error}")
        return dict(result)


def document(run: PipelineRun) -> dict[str, Any]:
    """Return the outcome of a pipeline as one JSON document."""
    record = run.record()
    return {
        "id": record.id,
        "name": record.name,
        "state": str(record.state),
        "error": record.error,
        "stages": [
            {
                "name": stage.name,
                "state": stage.state,
                "taskType": stage.task_type,
                "seconds": stage.seconds,
                "error": stage.error or None,
                "result": stage.result,
                "folders": stage.folders,
                "tasks": stage.tasks,
            }
            for stage in collect(run)
        ],
    }


def show(run: PipelineRun, *, every_row: bool = False) -> None:
    """Print the outcome of a pipeline."""
    from gpuflow.cli.output import line

    stages = collect(run)
    most = None if every_row else _MOST_ROWS
    wanted = str((run.template().metadata.get("annotations") or {}).get(COMPARE, ""))
    compared = compared_stages(stages, wanted)
    line()
    for stage in stages:
        for text in stage_lines(stage):
            line(text)
    for stage in stages:
        if stage.items and stage not in compared:
            print_grid(items_grid(stage, most), run.id)
    if compared:
        print_grid(compare_grid(compared, most), run.id)


def compared_stages(stages: Sequence[StageSummary], wanted: str = "") -> list[StageSummary]:
    """Return the stages to put side by side: those that `wanted` names, else inference stages with the same inputs."""
    done = {stage.name: stage for stage in stages if stage.items}
    if wanted:
        named = [done[name.strip()] for name in wanted.split(",") if name.strip() in done]
        return named if len(named) > 1 else []
    for stage in done.values():
        same = [other for other in done.values() if _inputs(other) == _inputs(stage)]
        if stage.task_type == "inference" and len(same) > 1:
            return [other for other in same if other.task_type == "inference"]
    return []


def stage_lines(stage: StageSummary) -> list[str]:
    """Return what to say of one stage."""
    took = f" in {duration(stage.seconds)}" if stage.seconds is not None and stage.state == "SUCCEEDED" else ""
    lines = [f"{stage.name}: {stage.state.lower()}{took}" + (f": {one_line(stage.error, 500)}" if stage.error else "")]
    result = stage.result or {}
    before, after = result.get("eval_loss_before"), result.get("eval_loss_after")
    if _is_number(before) and _is_number(after):
        lines.append(f"  eval loss {before:.4g} before, {after:.4g} after")
    counts = [
        f"{label} {result[name]:.4g}"
        for name, label in (("steps", "steps"), ("train_loss", "train loss"), ("eval_loss", "eval loss"))
        if _is_number(result.get(name))
    ]
    if counts:
        lines.append("  " + ", ".join(counts))
    lines += _training_lines(result)
    usage = result.get("usage")
    if isinstance(usage, Mapping) and _is_number(usage.get("total_tokens")):
        lines.append(f"  {usage['total_tokens']:g} tokens")
    if result and len(lines) == 1 and not stage.items:
        lines.append("  " + one_line(json.dumps(_kept(result), ensure_ascii=False, default=str), 300))
    for name in ("final_model_path", "final_lora_path", "final_index_path"):
        if isinstance(result.get(name), str):
            lines.append(f"  {name.removesuffix('_path')}: {result[name]}")
    missing = result.get("missing_artifacts")
    if isinstance(missing, list) and missing:
        lines.append("  missing: " + one_line(", ".join(map(str, missing)), 300) + " (asked for in output.artifacts)")
    warnings = result.get("warnings")
    if isinstance(warnings, list):
        lines += [f"  warning: {one_line(str(warning), 500)}" for warning in warnings[:_MOST_WARNINGS]]
    if stage.folders:
        lines.append(
            f"  files: {stage.folders[0]}" + (f" and {len(stage.folders) - 1} more" if stage.folders[1:] else "")
        )
    return lines


def _kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a result without rows: its output, of any shape, then its numbers and texts.

    Of a stage with several tasks, the output of each; of functions, what they have returned.
    """
    several = result.get("results")
    if isinstance(several, list) and all(isinstance(one, Mapping) and "output" in one for one in several):
        return {"outputs": [one["output"] for one in several]}
    if isinstance(several, list) and all(isinstance(one, Mapping) and "value" in one for one in several):
        return {"values": [one["value"] for one in several]}
    output = {"output": result["output"]} if result.get("output") is not None else {}
    return output | {
        name: value
        for name, value in result.items()
        if name == "value"
        or (name != "output" and not isinstance(value, Mapping | list) and not name.startswith("result_dir"))
    }


def _training_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what a training says of its rows; nothing for other results."""
    lines = []
    if _is_number(result.get("rows_trained")) and _is_number(result.get("rows")):
        dropped = result.get("rows_dropped")
        reasons = {f"left out: {key}": value for key, value in dropped.items()} if isinstance(dropped, Mapping) else {}
        others = {"to evaluate": result.get("rows_evaluated"), **reasons, "cut": result.get("rows_truncated")}
        said = [f"{number:g} {one_line(what, 80)}" for what, number in others.items() if _is_number(number) and number]
        rest = f" ({', '.join(said)})" if said else ""
        lines.append(f"  trained on {result['rows_trained']:g} of {result['rows']:g} rows{rest}")
    return lines


def items_grid(stage: StageSummary, most: int | None = _MOST_ROWS) -> Grid:
    """Return inputs and outputs of a stage as a table."""
    rows = [(text_of(item.get("input")), text_of(item.get("output"))) for item in stage.items]
    return _grid(stage.name, ("input", "output"), rows, most)


def compare_grid(stages: Sequence[StageSummary], most: int | None = _MOST_ROWS) -> Grid:
    """Return the outputs of several stages side by side, a row for each input."""
    length = max(len(stage.items) for stage in stages)
    rows = []
    for index in range(length):
        items = [stage.items[index] if index < len(stage.items) else {} for stage in stages]
        rows.append((text_of(items[0].get("input")), *(text_of(item.get("output")) for item in items)))
    title = " and ".join(stage.name for stage in stages)
    return _grid(title, ("input", *(stage.name for stage in stages)), rows, most)


def text_of(value: object) -> str:
    """Return an input or output as people read it: the last words of a chat, else text or JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "messages" in value:
        value = value["messages"]
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "content" in part for part in value):
        return text_of(value[-1]["content"])
    for name in ("prompt", "input", "text", "question"):
        if isinstance(value, Mapping) and isinstance(value.get(name), str):
            return str(value[name])
    return json.dumps(value, ensure_ascii=False, default=str)


def _grid(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int | None) -> Grid:
    shown = rows if most is None else rows[:most]
    cells = tuple(tuple(one_line(cell, _CELL) for cell in row) for row in shown)
    return Grid(title=title, headers=headers, rows=cells, more=len(rows) - len(shown))


def print_grid(grid: Grid, run_id: str) -> None:
    """Print a table: with rich in a terminal, else a line for each cell."""
    import sys

    from gpuflow.cli.output import line

    if sys.stdout.isatty():
        from rich.box import ROUNDED
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(title=Text(grid.title), box=ROUNDED, show_lines=True, title_justify="left")
        for header in grid.headers:
            shown.add_column(Text(header), overflow="fold", ratio=1)
        for row in grid.rows:
            shown.add_row(*(Text(cell) for cell in row))
        Console().print(shown)
    else:
        line()
        line(f"{grid.title}:")
        width = max(len(header) for header in grid.headers)
        for number, row in enumerate(grid.rows):
            if number:
                line()
            for header, cell in zip(grid.headers, row, strict=True):
                line(f"  {header.ljust(width)}  {cell}")
    if grid.more:
        line(f"and {grid.more} more; see `gpuflow result {run_id} --json`")


def _inputs(stage: StageSummary) -> list[str]:
    return [text_of(item.get("input")) for item in stage.items]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _home(result: Mapping[str, Any]) -> str:
    """Return the folder of a task's results, where links lead to the committed attempt."""
    folder = Path(str(result["result_dir"]))
    return str(folder.parent if folder.name.startswith("attempt-") else folder)
