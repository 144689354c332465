"""A team's own functions, as `--include team_functions` brings them in: they run in children."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from celery import Task, shared_task
from celery.exceptions import SoftTimeLimitExceeded

from gpuflow import BatchedCall, app, batch
from gpuflow.errors import TaskDead, TaskFailed


class TeamError(Exception):
    """An exception of the team's own."""


@app.task(resources="A100:1")
def gpus(until: str = "") -> list[Any]:
    while until and not Path(until).exists():
        time.sleep(0.01)
    return [os.environ["CUDA_VISIBLE_DEVICES"].split(","), os.getpid()]


@app.task(resources="A100:1")
def on_gpu(number: int, seconds: float = 0) -> list[int]:
    time.sleep(seconds)
    return [number, len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))]


@app.task(resources="A100:1", keep_warm="5s")
def warm_on_gpu(number: int, seconds: float = 0) -> list[int]:
    time.sleep(seconds)
    return [number, len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))]


@app.task(resources="A100:1", keep_warm="5s", batch=batch(4, "0.2s"))
def batched_on_gpu(calls: list[BatchedCall]) -> list[list[int]]:
    time.sleep(max(call.args[1] for call in calls))
    return [[call.args[0], len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))] for call in calls]


@app.task(child=True)
def add(a: int, b: int) -> int:
    return a + b


@app.task(child=True)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(child=True)
def after(day: date) -> date:
    return day.replace(day=day.day + 1)


@app.task(child=True)
def block(seconds: float = 600) -> None:
    time.sleep(seconds)


@app.task(child=True)
def softly() -> str:
    try:
        time.sleep(600)
    except SoftTimeLimitExceeded:
        return "stopped softly"
    return "not stopped"


@app.task(child=True)
def end(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "raise":
        raise TeamError("of the team", 7)
    if how == "value":
        raise ValueError("not that")


@app.task(child=True)
def not_json() -> Any:
    return object()


@app.task(bind=True, child=True)
def about(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    request = self.request
    return {
        "id": request.id,
        "args": list(request.args),
        "kwargs": request.kwargs,
        "retries": request.retries,
        "hostname": request.hostname,
        "name": self.name,
        "called_directly": request.called_directly,
        "root": request.root_id,
    }


@app.task(bind=True, child=True, max_retries=3)
def third_time(self: Any, folder: str, count: int = 0) -> int:
    Path(folder, f"{self.request.id}-{self.request.retries}").touch()
    if self.request.retries < 2:
        raise self.retry(args=(folder,), kwargs={"count": count + 10}, countdown=0.1)
    return count


@app.task(bind=True, child=True, autoretry_for=(TeamError,), max_retries=1, default_retry_delay=0.1)
def in_vain(self: Any) -> None:
    raise TeamError(f"try {self.request.retries}")


@app.task(bind=True, child=True)
def state(self: Any, until: str) -> str:
    self.update_state(state="HALFWAY", meta={"rows": 7})
    while not Path(until).exists():
        time.sleep(0.01)
    return "done"


@app.task(child=False, resources="A100:1")
def in_thread() -> int:
    return os.getpid()


@app.task(bind=True, child=True)
def replaced(self: Any, how: str, resources: dict[str, Any] | None = None) -> Any:
    if how == "by a plain task":
        return self.replace(app.signature("plain_tasks.add", args=(20, 3)))
    if how == "by a function":
        return self.replace(add.s(20, 4).set(resources=resources) if resources else add.s(20, 4))
    if how == "by itself":
        return self.replace(replaced.s("by a function"))
    return self.replace(add.s(20, 1) | add.s(4))


@app.task(bind=True, child=True)
def ignored(self: Any) -> None:
    from celery.exceptions import Ignore

    raise Ignore


@app.task(bind=True, child=True)
def rejected(self: Any, requeue: bool) -> bool:
    from celery.exceptions import Reject

    if requeue and self.request.delivery_info["redelivered"]:
        return True
    raise Reject("not by me", requeue=requeue)


@app.task(bind=True, child=True, max_retries=3)
def with_signature(self: Any, url: str) -> list[str]:
    """Return what it was called with the second time, and what it has set as its state."""
    meta = f"{url}&X-Amz-Signature=0123456789abcdef0123456789abcdef"
    if self.request.retries == 0:
        raise self.retry(args=(meta,), countdown=0, queue=self.request.headers.get("to"), priority=9)
    self.update_state(state="HALFWAY", meta=url)
    return [url, self.request.delivery_info["routing_key"], str(self.request.delivery_info["priority"])]


@app.task(bind=True, child=True, autoretry_for=(Exception,), max_retries=1)
def replaced_though_it_retries(self: Any) -> Any:
    return self.replace(add.s(1, 2))


@app.task(bind=True, child=True)
def replaced_in_vain(self: Any) -> Any:
    return self.replace(add.s(1, 2).set(serializer="none-such"))


@app.task(bind=True, child=True, max_retries=1)
def asks_quietly(self: Any) -> int:
    self.retry(countdown=0, throw=False) if not self.request.retries else None
    return int(self.request.retries)


class TeamTask(Task):  # type: ignore[misc]
    """A class of the team's that knows nothing of gpuflow."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        os.environ["TEAM_BEGAN"] = str(os.getpid())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [os.getpid(), super().__call__(*args, **kwargs)]


@app.task(base=TeamTask, bind=True, child=True)
def of_a_team(self: Any) -> list[Any]:
    return [os.getpid(), os.environ["TEAM_BEGAN"], os.getppid(), self.request.id]


@shared_task(child=True)
def shared() -> int:
    return os.getpid()


@app.task(child=True)
def surroundings() -> dict[str, Any]:
    return {
        "variable": os.environ.get("TEAM_VARIABLE"),
        "address": os.environ.get("REDIS_URL"),
        "pid": os.getpid(),
        "started_with": Path("/proc/self/environ").read_text(),
        "cwd": str(Path.cwd()),
    }


@app.task(child=True)
def passes_on(kind: str) -> None:
    raise {"dead": TaskDead, "failed": TaskFailed}[kind]("of another task", {"type": "Other", "message": "of another"})


@app.task(child=True)
def leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    atexit.register(os.abort)
    return os.getpid()


@app.task(child=True)
def raises_what_the_worker_lacks() -> None:
    import team_errors

    raise team_errors.OnlyThereError("where it was raised")


@app.task(bind=True, child=True)
def calls_another(self: Any) -> str:
    return str(add.delay(1, 1).id)


@app.task(child=True)
def returns_a_call() -> Any:
    return (add.s(1, 1) | add.s(2))()


@app.task(child=True)
def note(task_id: str, folder: str) -> None:
    Path(folder, task_id).touch()


@app.task(bind=True, child=True)
def header(self: Any) -> Any:
    return [self.request.my_header, self.request.get("gpuflow_function"), self.request.correlation_id]


@app.task(child=True, name="team: odd@name+of~a/function")
def odd() -> str:
    return "odd"


@app.task(child=True, acks_late=False, ignore_result=True)
def acknowledged_early(path: str) -> None:
    Path(path).write_text("done")
