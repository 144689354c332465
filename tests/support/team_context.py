"""Functions of a team that tell and ask by `gpuflow.context`, as `--include team_context` brings them in."""

from __future__ import annotations

import json
import os
import time
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpuflow import app, context


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int
    name: str = "none"


class Answer(BaseModel):
    doubled: int


def wait_for(path: str | Path) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


@app.task(child=True)
def tells(until: str) -> str:
    context.progress(3, 60, "warming up", loss=1.25)
    context.log("a line of its own", rows=7, name="two words")
    wait_for(until)
    return "done"


@app.task(child=True)
def tells_nothing() -> str:
    return "nothing"


@app.task(child=True)
def makes(outside: str) -> list[dict[str, Any]]:
    (context.output_dir / "own.txt").write_text("of its own")
    return [
        context.artifact("own.txt"),
        context.artifact(outside, "copied/data.bin"),
        context.artifact("table.json", content={"rows": [1, 2]}),
    ]


@app.task(child=True)
def reads(references: list[dict[str, Any]]) -> list[str]:
    return [context.local_path(one).read_text() for one in references]


@app.task(child=True)
def leaves(name: str) -> dict[str, Any]:
    return context.artifact(name, content="x")


@app.task(resources="A100:1")
def about() -> dict[str, Any]:
    return {
        "gpus": context.gpus,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"].split(","),
        "attempt": context.attempt,
        "task_id": context.task_id,
        "resume_from": context.resume_from,
    }


@app.task(child=True)
def works(steps: int, go: str) -> dict[str, Any]:
    """Save a checkpoint in each step, until told to stop; the first attempt waits for the file `go` before its last."""
    began = json.loads((context.resume_from / "state.json").read_text())["step"] if context.resume_from else 0
    step = began
    while step < steps:
        step += 1
        with context.checkpoint(step) as folder:
            (folder / "state.json").write_text(json.dumps({"step": step}))
        context.progress(step, steps)
        while step == steps - 1 and context.attempt == 1 and not Path(go).exists():
            if context.should_stop():
                raise context.Stopped(f"step {step} is saved")
            time.sleep(0.01)
    return {"began": began, "step": step, "attempt": context.attempt, "stop": context.should_stop()}


@app.task(child=True)
def cleans_up(folder: str) -> str:
    Path(folder, "begun").touch()
    while not context.should_stop():
        time.sleep(0.01)
    Path(folder, "cleaned").touch()
    return "left early"


@app.task(child=True)
def leaves_unasked() -> None:
    raise context.Stopped("nobody asked")


@app.task
def in_thread(until: str) -> dict[str, Any]:
    context.progress(0.5, loss=2)
    context.log("of a thread")
    wait_for(until)
    reference = context.artifact("note.txt", content="in a thread")
    return {
        "task_id": context.task_id,
        "attempt": context.attempt,
        "gpus": context.gpus,
        "stop": context.should_stop(),
        "read": context.local_path(reference).read_text(),
        "folder": str(context.output_dir),
    }


@app.task
def thread_that_leaves(folder: str) -> str:
    return leave_once(folder)


@app.task(merge=True)
def merged_that_leaves(folder: str) -> str:
    return leave_once(folder)


def leave_once(folder: str) -> str:
    begun = Path(folder, "begun")
    if begun.exists():
        return "again"
    begun.touch()
    while not context.should_stop():
        time.sleep(0.01)
    raise context.Stopped("elsewhere")


@app.task(child=True, pydantic=True, autoretry_for=(Exception,), max_retries=3, default_retry_delay=0.1)
def doubled(request: Request, times: int = 1) -> Answer:
    return Answer(doubled=request.x * 2 * times)


@app.task(pydantic=True)
def doubled_in_thread(request: Request) -> Answer:
    return Answer(doubled=request.x * 2)


@app.task(bind=True, child=True, max_retries=1)
def measures(self: Any, text: str, *, day: date) -> list[Any]:
    if not self.request.retries:
        raise self.retry(countdown=0)
    return [len(text), day.isoformat(), len(self.request.args[0])]
