"""The app that functions.py measures as ours: gpuflow with functions in children, cold, warm and batched."""

from __future__ import annotations

import os
import time

from functions_work import BATCH_SECONDS, CALL_SECONDS, embed, make_model

from gpuflow import BatchedCall, batch
from gpuflow.celery_app import app

__all__ = ["alone", "app", "batched", "cold", "empty", "warm"]


class Model(app.Task):  # type: ignore[name-defined,misc]
    """A class of tasks that loads a model."""

    def load(self) -> None:
        """Load it."""
        self.model = make_model()


@app.task(name="bench.cold", child=True)
def cold() -> int:
    """Return in which process it ran."""
    return os.getpid()


@app.task(name="bench.warm", base=Model, bind=True, keep_warm="3s")
def warm(self: Model, number: int) -> int:
    """Ask the model that this process has loaded."""
    return embed(self.model, number, CALL_SECONDS)


@app.task(name="bench.empty", keep_warm="3s")
def empty(number: int) -> int:
    """Do nothing."""
    return number


@app.task(name="bench.batched", keep_warm="3s", batch=batch(64, "5ms"))
def batched(calls: list[BatchedCall]) -> list[int]:
    """Answer many in the time of one."""
    time.sleep(BATCH_SECONDS)
    return [call.args[0] for call in calls]


@app.task(name="bench.alone", keep_warm="3s")
def alone(number: int) -> int:
    """Answer one in that time."""
    time.sleep(BATCH_SECONDS)
    return number
