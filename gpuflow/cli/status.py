"""`gpuflow status`: one run, or all recent ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.errors import DONE, bad_input, interrupted
from gpuflow.cli.options import json_option
from gpuflow.cli.selecting import selection_of, selection_options

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import Task
    from gpuflow.ledger.records import TaskRecord
    from gpuflow.ledger.selection import Selection
    from gpuflow.pipelines.records import PipelineRecord


@click.command(short_help="Show a pipeline or task, or all recent ones.")
@click.argument("record_ids", metavar="[ID]...", nargs=-1)
@click.option(
    "--watch", "-w", "watching", is_flag=True, help="Live, until it ends (exit code 0 or 1); without ID: the fleet."
)
@click.option(
    "-n", "--limit", default=20, show_default=True, type=click.IntRange(1, 100_000), help="How many recent ones."
)
@selection_options
@json_option
def status(record_ids: tuple[str, ...], watching: bool, limit: int, filters: Mapping[str, Any], as_json: bool) -> int:
    """Show the state of a pipeline or task, or of several; without ID, the recent ones, or the tasks that all filters
    select.

    --watch without ID shows workers, queues, running tasks and rates until Ctrl-C; where there is no terminal, a line
    whenever they change.
    """
    from gpuflow.cli.session import connected, signals_interrupt

    selection = selection_of(filters)
    if record_ids and not selection.is_empty:
        raise bad_input("ids name tasks and pipelines, and filters select them; give one of the two")
    if watching and len(record_ids) > 1:
        raise bad_input("--watch follows one task or pipeline; without an ID it shows the fleet")
    if watching and not record_ids and (as_json or not selection.is_empty):
        raise bad_input(
            "--watch with --json or filters needs the ID of a pipeline or task; `gpuflow status` lists them"
        )
    with connected() as app:
        if watching and not record_ids:
            from gpuflow.cli.fleet_watch import watch_fleet

            with signals_interrupt():
                watch_fleet(app)
            return DONE
        if not selection.is_empty:
            _selected(app, selection, limit, as_json)
            return DONE
        if not record_ids:
            _recent(app, limit, as_json)
            return DONE
        if len(record_ids) > 1:
            _named(app, record_ids, as_json)
            return DONE
        return _one(app, record_ids[0], watching=watching, as_json=as_json)


def _one(app: GPUFlow, record_id: str, *, watching: bool, as_json: bool) -> int:
    from gpuflow import client
    from gpuflow.cli import output, watch
    from gpuflow.client import reachable

    handle = client.get(record_id, app=app)
    if watching:
        try:
            watch.show(app, handle, on_stderr=as_json)
        except KeyboardInterrupt as error:
            output.note(watch.kept_going(record_id))
            return interrupted(error)
    if as_json:
        output.emit_json(handle.status())
    elif not watching:
        with reachable():
            now = app.ledger.now()
        _print(handle.status(), now)
        if not isinstance(handle, client.PipelineRun):
            _print_attempts(handle, now)
    return watch.verdict(handle) if watching else DONE


def _print_attempts(task: Task, now: float) -> None:
    from gpuflow.cli import output
    from gpuflow.cli.dead import print_attempts

    attempts = task.attempts()
    if len(attempts) > 1 or any(entry.outcome != "succeeded" for entry in attempts):
        output.line()
        print_attempts(attempts, now, logs=False)


def _print(shown: dict[str, Any], now: float) -> None:
    from gpuflow.cli import output

    stages = shown.get("stages")
    if stages is None:
        times = {"createdAt": "created", "startedAt": "started", "finishedAt": "finished"}
        output.pairs({times.get(name, name): _text(name, value, now) for name, value in shown.items()})
        return
    output.pairs(
        {
            "pipeline": shown["id"],
            "name": shown["name"],
            "owner": shown["owner"],
            "state": shown["state"],
            "created": output.when_ago(shown["createdAt"], now),
            "finished": output.when_ago(shown["finishedAt"], now),
            "error": (shown["error"] or {}).get("message", ""),
        }
    )
    rows = []
    for stage in stages:
        tasks = stage["tasks"]
        rows.append([stage["name"], stage["state"], "", "", (stage["error"] or {}).get("message", "")])
        rows += [["", task["state"], task["id"], _doing(task, now), _why(task)] for task in tasks]
    output.line()
    output.table(["stage", "state", "task", "doing", "why"], rows)


def _doing(task: dict[str, Any], now: float) -> str:
    from gpuflow.cli import output

    if task["state"] == "QUEUED":
        lost = f"; {task.get('worker', 'its worker')} was lost" if task.get("lost") else ""
        return f"waits in {task.get('queue', '')}{lost}"
    took = output.span(task.get("startedAt"), task.get("finishedAt"), now)
    progress = task.get("progress") or {}
    counted = f"{progress.get('current', 0):g}/{progress['total']:g}" if progress.get("total") else ""
    return "  ".join(part for part in (took, counted, task.get("worker", "")) if part)


def _why(task: dict[str, Any]) -> str:
    return str((task.get("error") or {}).get("message", ""))


def _text(name: str, value: Any, now: float) -> Any:
    from gpuflow.cli import output

    if name in ("createdAt", "startedAt", "finishedAt"):
        return output.when_ago(value, now)
    if name == "error" and isinstance(value, dict):
        return str(value.get("message", ""))
    return value


def _named(app: GPUFlow, record_ids: Sequence[str], as_json: bool) -> None:
    """Show the tasks and pipelines of these ids. Raises UnknownTask where there is one that is neither."""
    from gpuflow.cli.selecting import apart
    from gpuflow.client import reachable

    pipelines, task_ids = apart(app, record_ids, steers=False)
    with reachable():
        tasks = app.ledger.as_seen(app.ledger.find_many(task_ids))
        _show(app, [one.record() for one in pipelines], tasks, as_json, empty="")


def _selected(app: GPUFlow, selection: Selection, limit: int, as_json: bool) -> None:
    """Show the tasks that filters select, those of pipelines too, the newest first."""
    from gpuflow.cli import output
    from gpuflow.client import reachable
    from gpuflow.ledger.selection import select

    with reachable():
        tasks = select(app.ledger, selection, limit + 1)
        more, tasks = len(tasks) > limit, tasks[:limit]
        _show(app, [], tasks, as_json, empty="no task that all of these filters select")
    if more:
        output.note(f"there are more than {limit}; --limit shows more of them")


def _show(
    app: GPUFlow, pipelines: Sequence[PipelineRecord], tasks: Sequence[TaskRecord], as_json: bool, *, empty: str
) -> None:
    """Show pipelines and tasks with all that a list tells of them. Raises redis errors."""
    from gpuflow.cli import output

    if as_json:
        output.emit_json({"pipelines": [one.public() for one in pipelines], "tasks": [task.public() for task in tasks]})
        return
    now = app.ledger.now()
    output.table(
        ["id", "name", "state", "what", "owner", "queue", "took", "submitted", "why"],
        [
            [
                *(one.id, one.name, str(one.state), "pipeline", one.owner, ""),
                output.span(one.created_at, one.finished_at, now),
                output.age(one.created_at, now),
                (one.error or {}).get("message", ""),
            ]
            for one in pipelines
        ]
        + [
            [
                *(task.id, task.name, str(task.state), task.task_type, task.owner, task.queue),
                output.span(task.started_at, task.finished_at, now),
                output.age(task.created_at, now),
                (task.error or {}).get("message", ""),
            ]
            for task in tasks
        ],
        empty=empty,
    )


def _recent(app: GPUFlow, limit: int, as_json: bool) -> None:
    from gpuflow.cli import output
    from gpuflow.client import reachable

    with reachable():
        pipelines = app.pipelines.recent(limit)
        tasks = [task for task in app.ledger.as_seen(app.ledger.recent(limit)) if not task.pipeline]
        now = app.ledger.now()
    if as_json:
        output.emit_json(
            {
                "pipelines": [
                    {
                        "id": item.id,
                        "name": item.name,
                        "state": str(item.state),
                        "owner": item.owner,
                        "createdAt": item.created_at,
                        "finishedAt": item.finished_at,
                        "error": item.error,
                    }
                    for item in pipelines
                ],
                "tasks": [task.public() for task in tasks],
            }
        )
        return
    rows: list[tuple[float, list[str]]] = [
        (
            item.created_at,
            [item.id, item.name, str(item.state), "pipeline", output.span(item.created_at, item.finished_at, now)],
        )
        for item in pipelines
    ]
    rows += [
        (
            task.created_at,
            [
                *(task.id, task.name, str(task.state), task.task_type),
                output.span(task.started_at, task.finished_at, now),
            ],
        )
        for task in tasks
    ]
    newest = [[*row, output.age(at, now)] for at, row in sorted(rows, reverse=True)][:limit]
    headers = ["id", "name", "state", "what", "took", "submitted"]
    output.table(headers, newest, empty="nothing was submitted yet; `gpuflow run quickstart` is a start")
