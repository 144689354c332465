"""Functions of a team that stages of pipelines call, as `--include team_stages` brings them in."""

from __future__ import annotations

import os
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from pydantic import BaseModel

from gpuflow import BatchedCall, app, batch, context


@app.task
def words(text: str, times: int = 1) -> list[str]:
    """Return the words of a text. It has no resources: called by Celery it runs in a thread."""
    return text.split() * times


@app.task
def lengths(texts: list[str], plus: int = 0) -> list[int]:
    """Return a number for each text."""
    return [len(text) + plus for text in texts]


@app.task(child=False)
def place() -> dict[str, Any]:
    """Say where it runs."""
    return {"pid": os.getpid(), "worker": os.getppid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


@app.task
def given(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what it is given, as Python shows it."""
    return {"args": repr(args), "kwargs": repr(kwargs)}


@app.task
def same(value: Any) -> Any:
    """Return what it is given."""
    return value


@app.task
def shape(value: Any) -> Any:
    """Return what it is given with its size in the place of each text."""
    return _shape(value)


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shape(item) for item in value]
    return len(value) if isinstance(value, str) else value


@app.task
def nested(levels: int) -> list[Any]:
    """Return lists in lists."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


@app.task
def following(day: date) -> date:
    """Return the next day."""
    return day + timedelta(days=1)


@app.task
def fails(message: str) -> None:
    """Fail."""
    raise ValueError(message)


@app.task
def waits(begun: str, until: str) -> str:
    """Note that it has begun, and wait for a file."""
    with Path(begun).open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not Path(until).exists():
        time.sleep(0.02)
    return "done"


@app.task(bind=True, max_retries=5)
def third_try(self: Any, factor: int = 1) -> list[int]:
    """Ask for a retry twice, each with another argument."""
    if self.request.retries < 2:
        raise self.retry(kwargs={"factor": factor * 10}, countdown=0)
    return [self.request.retries, factor]


@app.task(bind=True)
def replaces(self: Any, how: str, resources: dict[str, Any] | None = None) -> Any:
    """Replace itself."""
    if how == "by a function":
        by = lengths.s(["a", "bb"], plus=10)
        return self.replace(by.set(resources=resources) if resources else by)
    if how == "by Celery's":
        return self.replace(app.signature("celery.map", kwargs={"task": words.s(), "it": []}))
    return self.replace(words.s("a b") | lengths.s())


@app.task(bind=True)
def hands_over(self: Any, to: str, args: list[Any], resources: dict[str, Any] | None = None) -> Any:
    """Let another function take its place."""
    by = app.signature(to, args=args)
    return self.replace(by.set(resources=resources) if resources else by)


@app.task
def ends(how: str) -> None:
    """Say to Celery how it ended."""
    if how == "ignore":
        raise Ignore
    if how == "retry":
        raise Retry("without asking")
    raise Reject("not by me", requeue=False)


@app.task(merge=True)
def merged(value: Any) -> list[Any]:
    """Say where it runs. Called by Celery it runs in a thread, once for equal calls."""
    return [os.getpid(), value]


@app.task(keep_warm="10m", batch=batch(8, "100ms"))
def together(calls: list[BatchedCall]) -> list[Any]:
    """Answer calls together."""
    return [{"double": 2 * call.args[0]} for call in calls]


@app.task(keep_warm="10m")
class Model:
    """An object whose methods are tasks."""

    def load(self) -> None:
        """Load it."""
        self.weight = 3

    def times(self, factor: int) -> list[int]:
        """Return a product, and the process."""
        return [self.weight * factor, os.getpid()]


class Ask(BaseModel):
    """Arguments with types."""

    text: str
    top_k: int = 5


@app.task(pydantic=True)
def search(ask: Ask) -> Ask:
    """Return what is asked."""
    return ask


@app.task(keep_warm="10m")
def warm(number: int) -> dict[str, int]:
    """Say which process answers."""
    return {"pid": os.getpid(), "number": number}


@app.task(resources="A100:1")
def on_gpu() -> list[str]:
    """Say which GPUs it has."""
    return list(context.gpus)


@app.task
def weights() -> dict[str, Any]:
    """Return what a file of its output is named by."""
    return context.artifact("weights.bin", content=b"\x00\x01 no JSON")


@app.task
def size_of(reference: dict[str, Any]) -> int:
    """Return how large such a file is."""
    return context.local_path(reference).stat().st_size
