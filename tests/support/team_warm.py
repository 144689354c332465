"""Functions of a team that stay warm, as a worker is given them by --include. Each says which process answered."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Task
from celery.exceptions import SoftTimeLimitExceeded

from gpuflow import BatchedCall, app, batch, context

_loads = 0


@app.task(resources="any", keep_warm="10m")
def where(text: str = "") -> dict[str, Any]:
    """Say which process answers, on which GPUs, and how often it was called."""
    global _loads
    _loads += 1
    print(f"asked for {text}")
    return {"pid": os.getpid(), "calls": _loads, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "text": text}


@app.task(keep_warm="10m")
def on_cpu() -> int:
    """Answer without a GPU."""
    return os.getpid()


@app.task(keep_warm="1s")
def briefly() -> int:
    """Answer, and idle out soon."""
    return os.getpid()


@app.task(keep_warm="10m", bind=True, max_retries=3)
def end(self: Any, how: str, path: str = "") -> Any:
    """End in one of the ways in which a call can end."""
    if how == "exit":
        sys.exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "raise":
        raise ValueError("not that")
    if how == "sleep":
        Path(path).write_text(str(os.getpid()))
        try:
            time.sleep(600)
        except SoftTimeLimitExceeded:
            return {"pid": os.getpid(), "stopped": "softly"}
    if how == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    return {"pid": os.getpid(), "retries": self.request.retries, "id": self.request.id}


@app.task(keep_warm="10m", batch=batch(8, "100ms"))
def together(calls: list[BatchedCall]) -> list[Any]:
    """Answer calls together; a negative number is refused, and a very negative one refuses the whole batch."""
    if any(call.args[0] < -10 for call in calls):
        raise ValueError("one of them is far too small")
    return [
        ValueError("too small") if call.args[0] < 0 else {"double": 2 * call.args[0], "size": len(calls)}
        for call in calls
    ]


@app.task(keep_warm="10m")
def says(text: str) -> None:
    """Print what it is given."""
    print(text)


@app.task
def count(values: list[Any]) -> int:
    """Count."""
    return len(values)


@app.task(keep_warm="10m")
class Model:
    """Two methods of one loaded object."""

    def load(self) -> None:
        """Load."""
        self.loaded_in = os.getpid()
        self.words = {"a": 1, "b": 2}

    def value(self, word: str) -> tuple[int, int]:
        """Return the value of a word."""
        return self.loaded_in, self.words[word]

    def total(self, *, factor: int = 1) -> tuple[int, int]:
        """Return the sum."""
        return self.loaded_in, factor * sum(self.words.values())


@app.task(keep_warm="10m")
class Broken:
    """One that cannot be loaded."""

    def load(self) -> None:
        """Fail."""
        raise LookupError("no weights here")

    def answer(self) -> None:
        """Do nothing."""


@app.task(resources="any", keep_warm="10m")
def waits(name: str, folder: str) -> list[Any]:
    """Say that it has begun, and wait until it is let go."""
    Path(folder, f"{name}.begun").touch()
    while not Path(folder, f"{name}.go").exists():
        time.sleep(0.01)
    return [os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")]


@app.task(resources="any:2")
def both() -> str | None:
    """Say which GPUs a call has that asks for two."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


class Loading(Task):  # type: ignore[misc]
    """A class of tasks of a team that loads what its tasks need."""

    def load(self) -> None:
        """Load."""
        self.loaded_in = os.getpid()


@app.task(base=Loading, bind=True, keep_warm="10m", autoretry_for=(OSError,), retry_kwargs={"countdown": 0})
def of_class(self: Any, folder: str, fails: int = 0) -> list[int]:
    """Fail so many times, and say where it was loaded."""
    tries = len(list(Path(folder).iterdir()))
    Path(folder, str(tries)).touch()
    if tries < fails:
        raise OSError("not yet")
    return [os.getpid(), self.loaded_in, self.request.retries]


class SessionClosing(Exception):
    """An exception of a team that has the name of one of ours."""


class EngineDied(Exception):
    """Likewise."""


@app.task(keep_warm="10m")
def raises(kind: str) -> str:
    """Raise what is hard to tell."""
    if kind == "long":
        raise ValueError("x" * 9_000_000)
    if kind in ("SessionClosing", "EngineDied"):
        raise globals()[kind]("of the team")
    return kind


@app.task(keep_warm="10m", batch=batch(2, "200ms"))
def prints(calls: list[BatchedCall]) -> list[str]:
    """Refuse lists, and print what a single call is given."""
    if len(calls) > 1:
        raise ValueError("not together")
    print(f"given {calls[0].args[0]}")
    return [str(calls[0].args[0])]


@app.task(keep_warm="10m")
def stops(path: str) -> str:
    """Ask whether it is to end, and say so when it is."""
    Path(path).touch()
    while not context.should_stop():
        time.sleep(0.01)
    Path(path).write_text("asked")
    raise context.Stopped("it has saved")


@app.task(keep_warm="10m")
class Calls:
    """A class whose `load` calls its own task."""

    def load(self) -> None:
        """Load."""
        self.loaded = self.double(1)

    def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number

    @staticmethod
    def helper(number: int) -> int:
        """Help."""
        return number
