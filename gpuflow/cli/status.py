"""`gpuflow status`: one run, or all recent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.errors import DONE, bad_input, interrupted
from gpuflow.cli.options import json_option
from gpuflow.cli.selecting import selection_of, selection_options

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import Task
    from gpuflow.ledger.selection import Selection


@click.command(short_help="Show a pipeline or task, or all recent ones.")
@click.argument("record_id", metavar="[ID]", required=False)
@click.option(
    "--watch", "-w", "watching", is_flag=True, help="Live, until it ends (exit code 0 or 1); without ID: the fleet."
)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100_000), help="How many recent ones.")
@selection_options
@json_option
def status(record_id: str | None, watching: bool, limit: int, filters: Mapping[str, Any], as_json: bool) -> int:
    """Show the state of a pipeline or task; without ID, the recent ones, or the tasks that all filters select.

    --watch without ID shows workers, queues, running tasks and rates until Ctrl-C; where there is no terminal, a line
    whenever they change.
    """
    from gpuflow.cli.session import connected, signals_interrupt

    selection = selection_of(filters)
    if record_id is not None and not selection.is_empty:
        raise bad_input(f"{record_id} is one task or pipeline, and filters select several; give one of the two")
    if watching and record_id is None and (as_json or not selection.is_empty):
        raise bad_input(
            "--watch with --json or filters needs the ID of a pipeline or task; `gpuflow status` lists them"
        )
    with connected() as app:
        if watching and record_id is None:
            from gpuflow.cli.fleet_watch import watch_fleet

            with signals_interrupt():
                watch_fleet(app)
            return DONE
        if not selection.is_empty:
            _selected(app, selection, limit, as_json)
            return DONE
        if record_id is None:
            _recent(app, limit, as_json)
            return DONE
        return _one(app, record_id, watching=watching, as_json=as_json)


def _one(app: GPUFlow, record_id: str, *, watching: bool, as_json: bool) -> int:
    from gpuflow import client
    from gpuflow.cli import output, watch

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
        _print(handle.status())
        if not isinstance(handle, client.PipelineRun):
            _print_attempts(handle)
    return watch.verdict(handle) if watching else DONE


def _print_attempts(task: Task) -> None:
    from gpuflow.cli import output
    from gpuflow.cli.dead import print_attempts

    attempts = task.attempts()
    if len(attempts) > 1 or any(entry.outcome != "succeeded" for entry in attempts):
        output.line()
        print_attempts(attempts, logs=False)


def _print(shown: dict[str, Any]) -> None:
    from gpuflow.cli import output

    stages = shown.get("stages")
    if stages is None:
        times = {"createdAt": "created", "startedAt": "started", "finishedAt": "finished"}
        output.pairs({times.get(name, name): _text(name, value) for name, value in shown.items()})
        return
    output.pairs(
        {
            "pipeline": shown["id"],
            "name": shown["name"],
            "owner": shown["owner"],
            "state": shown["state"],
            "created": output.when(shown["createdAt"]),
            "finished": output.when(shown["finishedAt"]),
            "error": (shown["error"] or {}).get("message", ""),
        }
    )
    rows = []
    for stage in stages:
        tasks = stage["tasks"]
        rows.append([stage["name"], stage["state"], "", "", (stage["error"] or {}).get("message", "")])
        rows += [["", task["state"], task["id"], _doing(task), _why(task)] for task in tasks]
    output.line()
    output.table(["stage", "state", "task", "doing", "why"], rows)


def _doing(task: dict[str, Any]) -> str:
    from gpuflow.cli import output

    if task["state"] == "QUEUED":
        lost = f"; {task.get('worker', 'its worker')} was lost" if task.get("lost") else ""
        return f"waits in {task.get('queue', '')}{lost}"
    took = output.span(task.get("startedAt"), task.get("finishedAt"))
    progress = task.get("progress") or {}
    counted = f"{progress.get('current', 0):g}/{progress['total']:g}" if progress.get("total") else ""
    return "  ".join(part for part in (took, counted, task.get("worker", "")) if part)


def _why(task: dict[str, Any]) -> str:
    return str((task.get("error") or {}).get("message", ""))


def _text(name: str, value: Any) -> Any:
    from gpuflow.cli import output

    if name in ("createdAt", "startedAt", "finishedAt"):
        return output.when(value)
    if name == "error" and isinstance(value, dict):
        return str(value.get("message", ""))
    return value


def _selected(app: GPUFlow, selection: Selection, limit: int, as_json: bool) -> None:
    """Show the tasks that filters select, those of pipelines too, the newest first."""
    from gpuflow.cli import output
    from gpuflow.client import reachable
    from gpuflow.ledger.selection import select

    with reachable():
        tasks = select(app.ledger, selection, limit + 1)
    more, tasks = len(tasks) > limit, tasks[:limit]
    if as_json:
        output.emit_json({"pipelines": [], "tasks": [task.public() for task in tasks]})
    else:
        output.table(
            ["id", "name", "state", "what", "owner", "queue", "took", "submitted", "why"],
            [
                [
                    *(task.id, task.name, str(task.state), task.task_type, task.owner, task.queue),
                    output.span(task.started_at, task.finished_at),
                    output.when(task.created_at),
                    (task.error or {}).get("message", ""),
                ]
                for task in tasks
            ],
            empty="no task that all of these filters select",
        )
    if more:
        output.note(f"there are more than {limit}; --limit shows more of them")


def _recent(app: GPUFlow, limit: int, as_json: bool) -> None:
    from gpuflow.cli import output
    from gpuflow.client import reachable

    with reachable():
        pipelines = app.pipelines.recent(limit)
        tasks = [task for task in app.ledger.as_seen(app.ledger.recent(limit)) if not task.pipeline]
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
            [item.id, item.name, str(item.state), "pipeline", output.span(item.created_at, item.finished_at)],
        )
        for item in pipelines
    ]
    rows += [
        (
            task.created_at,
            [task.id, task.name, str(task.state), task.task_type, output.span(task.started_at, task.finished_at)],
        )
        for task in tasks
    ]
    newest = [[*row, output.when(at)] for at, row in sorted(rows, reverse=True)][:limit]
    headers = ["id", "name", "state", "what", "took", "submitted"]
    output.table(headers, newest, empty="nothing was submitted yet; `gpuflow run quickstart` is a start")
