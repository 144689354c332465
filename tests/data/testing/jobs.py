"""Functions that tests of gpuflow.testing call."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Task

from gpuflow import app


@app.task
def in_thread(prefixes: list[str]) -> dict[str, str]:
    """Return the variables of the worker that begin so."""
    return {name: value for name, value in os.environ.items() if name.startswith(tuple(prefixes))}


@app.task(child=True)
def say(words: str) -> int:
    print(words)
    return os.getpid()


@app.task(child=True)
def block(pids: str) -> None:
    Path(pids, str(os.getpid())).touch()
    time.sleep(600)


@app.task(resources="A100:1")
def gpus(until: str = "") -> str:
    while until and not Path(until).exists():
        time.sleep(0.01)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "none")


@app.task(child=True)
def add(a: int, b: int) -> int:
    return a + b


@app.task(child=True)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(merge=True)
def merged(number: int) -> list[int]:
    return [number, os.getpid()]


@app.task(bind=True, child=True, max_retries=2)
def third_time(self: Task) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(bind=True, child=True)
def halfway(self: Task) -> int:
    self.update_state(state="HALFWAY", meta={"rows": 7})
    return 7


@app.task(child=True)
def fail() -> None:
    raise ValueError("not that")
