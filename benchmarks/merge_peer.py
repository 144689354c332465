"""The app that merge.py measures as its peers: plain Celery whose worker keeps one model loaded.

The model is served by the session process of gpuflow's own worker (`python -m executors session`), so that all sides
run the same engine; what differs is what stands before it. Two tasks:

* `bench.generate`: each call is executed.
* `bench.generate_once`: with a lock by arguments, as celery-singleton has it (0.3.1, Singleton.apply_async): the first
  call takes the lock; an equal one that is sent while the lock is held gets the AsyncResult of the first.

What such a lock cannot do:

* An equal call is no task of its own: it has no id, no record, links or time limit, and revoking it revokes the first.
  In a chord it is never counted, so that the body never runs.
* The lock ends with its task: a result is not used again.
* A worker that dies leaves the lock behind until it expires (LOCK_SECONDS; celery-singleton has no expiry by default),
  and whoever ends deletes it, also when it has expired and another call has taken it since.
* celery-once refuses an equal call (AlreadyQueued) and gives its caller no result at all, so it is not measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import redis
from celery import Task
from celery.result import AsyncResult
from stock_celery import stock_app

#: For how long a lock is held that nobody releases.
LOCK_SECONDS = 600
#: How long one answer may take, the load of the model included.
ANSWER_SECONDS = 300.0

app = stock_app(os.environ["REDIS_URL"])
locks = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)


class WarmModel:
    """One session process, begun by the first request; each request waits for its own answer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._folder = Path(os.environ["RESULTS_DIR"])
        self._open: dict[str, Future[dict[str, Any]]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "executors", "session"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        opening = {name: spec[name] for name in ("taskType", "model")}
        self._say({"op": "open", "engine": spec["engine"], "task_type": spec["taskType"], "spec": opening})
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the result value of one call. Raises RuntimeError for one that failed."""
        name, done = uuid.uuid4().hex, Future[dict[str, Any]]()
        self._open[name] = done
        request = {"task_id": name, "task_type": spec["taskType"], "spec": spec, "output_dir": str(self._folder / name)}
        self._say({"op": "run", "id": name, "request": request})
        return done.result(timeout=ANSWER_SECONDS)

    def _say(self, operation: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(operation)
        with self._lock:
            print(line, file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            name = event.get("id")
            if event["event"] == "result":
                self._values[name] = event["value"]
            elif event["event"] == "finish" and name in self._open:
                done, value = self._open.pop(name), self._values.pop(name, None)
                if event["status"] == "completed" and value is not None:
                    done.set_result(value)
                else:
                    done.set_exception(RuntimeError(str(event.get("error"))))


_models: dict[str, WarmModel] = {}
_models_lock = threading.Lock()


def answer(spec: dict[str, Any]) -> dict[str, Any]:
    """Answer a call with the model that is loaded; the first call loads it."""
    with _models_lock:
        model = _models.get("model") or _models.setdefault("model", WarmModel(spec))
    return model.answer(spec)


class Locked(Task):  # type: ignore[misc]
    """A task of which equal calls are sent once while one of them waits or runs."""

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any) -> Any:
        """Send the call, or return the result of an equal one that is under way."""
        lock, task_id = self.lock_of(args, kwargs), task_id or str(uuid.uuid4())
        while not locks.set(lock, task_id, nx=True, ex=LOCK_SECONDS):
            holder = locks.get(lock)
            if holder is not None:
                return AsyncResult(str(holder), app=self.app)
        return super().apply_async(args, kwargs, task_id=task_id, **options)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Release the lock."""
        locks.delete(self.lock_of(args, kwargs))

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Release the lock."""
        locks.delete(self.lock_of(args, kwargs))

    def lock_of(self, args: Any, kwargs: Any) -> str:
        """Return the key of the lock of a call."""
        text = json.dumps([self.name, list(args or ()), kwargs or {}], sort_keys=True)
        return f"peer:lock:{hashlib.sha256(text.encode()).hexdigest()}"


@app.task(name="bench.generate")
def generate(spec: dict[str, Any]) -> dict[str, Any]:
    """Execute a call."""
    return answer(spec)


@app.task(name="bench.generate_once", base=Locked)
def generate_once(spec: dict[str, Any]) -> dict[str, Any]:
    """Execute a call; equal ones that are under way share it."""
    return answer(spec)
