"""`gpuflow executor`: what runs task types here, and one request run by itself, without broker and worker.

What is shown of a run is decided in `executor_view`, how children are started in `executor_child`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import BAD_INPUT, DONE, FAILED, bad_input
from gpuflow.cli.options import json_option
from gpuflow.merge.specs import MERGED

if TYPE_CHECKING:
    from gpuflow.protocol import Request
    from gpuflow.settings import Settings
    from gpuflow.worker.standalone import Standalone

#: Errors of a request that no attempt can fulfil.
_BAD_INPUT: Final = frozenset({"BadInput", "BadRequest", "UnknownTaskType"})


@click.group(short_help="List the executors; run one by itself.")
def executor() -> None:
    """Look at the executors of this machine, gpuflow's own and yours, and run one by itself."""


@executor.command("list")
@json_option
def list_executors(as_json: bool) -> None:
    """List the task types that have an executor here; each is imported, and what is wrong with it is said."""
    from gpuflow.cli import output
    from gpuflow.settings import Settings
    from gpuflow.worker.user_environments import described

    rows = described(Settings.load())
    if as_json:
        output.emit_json(rows)
        return
    output.table(
        ["task type", "from", "environment", "state", "about"],
        [
            [
                row["task_type"],
                row["source"],
                row["environment"] or "",
                "fail" if row["problem"] else "ok",
                row["about"],
            ]
            for row in rows
        ],
    )
    for row in rows:
        if row["problem"]:
            output.note(f"{row['task_type']}: {row['problem']}")


@executor.command("run")
@click.argument("file", metavar="REQUEST.JSON")
@click.option("-o", "--output", "folder", metavar="DIR", help="Where its files go (default: ./TASK_TYPE-output).")
@json_option
def run(file: str, folder: str | None, as_json: bool) -> int:
    """Run one request here, in a child process as a worker would start it; no broker is needed.

    REQUEST.JSON (`-` for stdin) is the spec of a task, {"taskType": ...}, or a whole request, {"task_id": ..., "spec":
    {...}}. Progress, events and log go to stderr, the result to stdout; with --json every event is a line on stdout,
    and the last line says how it ended. Exit codes: 0 completed, 1 failed, 2 bad input, 130 Ctrl-C.
    """
    from gpuflow.cli.executor_child import child_start
    from gpuflow.cli.executor_inputs import localized
    from gpuflow.cli.executor_view import EventLines, EventView
    from gpuflow.settings import Settings
    from gpuflow.worker.spec_policy import as_operator
    from gpuflow.worker.standalone import Standalone, deadline_of

    settings = as_operator(Settings.load())
    request = localized(_read(file, folder, settings), settings)
    start = child_start(request, settings)
    view = EventLines() if as_json else EventView()
    runner = Standalone(
        request,
        argv=start.argv,
        environment=start.environment,
        on_event=view.show,
        deadline_seconds=deadline_of(request.spec),
        grace_seconds=settings.grace_seconds,
    )
    with view, _stopped_by_signals(runner) as signals:
        ended = runner.run()
    view.end(ended, request.output_dir)
    if ended.completed:
        return DONE
    if signals:
        return 128 + signals[0]
    return BAD_INPUT if (ended.error or {}).get("type") in _BAD_INPUT else FAILED


@contextmanager
def _stopped_by_signals(runner: Standalone) -> Iterator[list[int]]:
    """Let the first Ctrl-C or SIGTERM stop the child, and a second one kill it; gives the signals that came."""
    came: list[int] = []

    def stop(number: int, _: Any) -> None:
        came.append(number)
        if len(came) == 1:
            os.write(2, b"stopping; once more to kill it\n")
        runner.stop("cancelled", at_once=len(came) > 1)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(file: str, folder: str | None, settings: Settings) -> Request:
    """Return the request of a file, complete and checked. Raises click.UsageError, InvalidTemplate, OSError."""
    from gpuflow.protocol import Request

    text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise bad_input(f"{file} is no JSON: {error}; give one JSON object") from None
    if not isinstance(raw, dict) or not ("taskType" in raw or "spec" in raw):
        raise bad_input(f'{file} is no request; give the spec of a task, {{"taskType": ...}}, or {{"spec": ...}}')
    if "taskType" in raw:
        raw = {"spec": raw}
    spec = raw["spec"]
    if not isinstance(spec, dict):
        raise bad_input(f"spec of {file} is no JSON object; give one with taskType")
    task_type = raw.get("task_type") or spec.get("taskType")
    if spec.get("taskType", task_type) != task_type:
        raise bad_input(f"{file} says task_type {task_type} and spec.taskType {spec['taskType']}; keep one of them")
    spec = _checked({"taskType": task_type, **spec})
    chosen = Path(folder or raw.get("output_dir") or f"{spec['taskType']}-output").absolute()
    defaults = {"task_id": "local", "cache_dir": str(settings.cache_dir), "checkpoint_dir": str(chosen / "checkpoints")}
    given = {**defaults, **raw, "spec": spec, "task_type": spec["taskType"], "output_dir": str(chosen)}
    try:
        request = Request.from_json(json.dumps(given))
    except (ValueError, TypeError) as error:
        raise bad_input(f"{file}: {error}; mend it") from None
    return replace(request, task_id=str(request.task_id))


def _checked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the canonical spec; the children of a merged one stay as they are. Raises InvalidTemplate."""
    from gpuflow.spec import canonical

    children = {MERGED: spec[MERGED]} if MERGED in spec else {}
    return canonical({name: part for name, part in spec.items() if name != MERGED}) | children
