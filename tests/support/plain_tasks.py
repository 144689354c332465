"""A team's own Celery tasks, as `--include plain_tasks` brings them in."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from gpuflow import app


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task(resources="A100:1")
def on_a100() -> str:
    return "ran"


@app.task(bind=True, soft_time_limit=0.5)
def too_slow(self: Any) -> str:
    from celery.exceptions import SoftTimeLimitExceeded

    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.01)
    except SoftTimeLimitExceeded:
        return "stopped softly"
    return "not stopped"


@app.task
def environment(name: str) -> str | None:
    return os.environ.get(name)


@app.task(bind=True)
def mark(self: Any, folder: str) -> None:
    """Leave one byte in a file named after the task, each time that it runs."""
    with Path(folder, self.request.id).open("ab") as file:
        file.write(b"x")


@app.task(ignore_result=True)
def wait_for(path: str) -> None:
    """End as soon as there is such a file; nothing is stored, so what follows at once is the acknowledgement."""
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@app.task
def out_of_memory() -> None:
    raise MemoryError("no room")


@app.task
def end(how: str) -> None:
    """End as a script does that was never meant for a worker."""
    import asyncio
    import sys

    if how == "exit":
        sys.exit("nothing to do")
    if how == "cancelled":
        raise asyncio.CancelledError
    raise KeyboardInterrupt


@app.task(bind=True)
def reject_first(self: Any) -> bool:
    """Put the message back once; the next delivery says that there was one before."""
    from celery.exceptions import Reject

    if not self.request.delivery_info["redelivered"]:
        raise Reject("once", requeue=True)
    return True


@app.task(bind=True)
def asked_eta(self: Any) -> str | None:
    return self.request.eta  # type: ignore[no-any-return]


@app.task
def outputs(results: list[dict[str, Any]]) -> list[Any]:
    """The body of a chord; counts itself."""
    app.redis.rpush("bodies", 1)
    return [result["output"] for result in results]


@app.task
def outputs_of_one(result: dict[str, Any]) -> Any:
    return result["output"]


@app.task
def note_output(result: dict[str, Any]) -> None:
    app.redis.rpush("noted", str(result["output"]))


def first_argument(name: str, *rest: object, **more: object) -> str | None:
    return name or None


@app.task(merge=True)
def merged_sum(a: int, b: int, gate: str = "") -> dict[str, int]:
    """Counts its executions; waits for a file where one is named."""
    app.redis.rpush("executed", f"{a}+{b}")
    while gate and not Path(gate).exists():
        time.sleep(0.02)
    return {"sum": a + b}


@app.task(merge=first_argument, resources="cpu", merge_result_ttl=600)
def merged_by_name(name: str, other: int = 0) -> str:
    app.redis.rpush("executed", name)
    return f"hello {name}"


class Unlucky(Exception):
    """An error of a team's own."""


@app.task(merge=True)
def merged_failure(message: str) -> None:
    app.redis.rpush("executed", message)
    raise Unlucky(message)


@app.task(merge=True)
def merged_sending(number: int) -> Any:
    return add.delay(number, number)


@app.task(bind=True, merge=True, max_retries=3)
def merged_retry(self: Any, number: int) -> int:
    tries = app.redis.rpush("executed", str(number))
    if tries < 3:
        raise self.retry(countdown=0.1)
    return tries


@app.task
def block() -> None:
    """Wait in a call that no exception gets into."""
    threading.Event().wait()


@app.task(bind=True, max_retries=5)
def retried(self: Any, tries: int) -> int:
    """Ask for a retry until it has been tried so often."""
    if self.request.retries + 1 < tries:
        raise self.retry(countdown=0.05)
    return int(self.request.retries) + 1
