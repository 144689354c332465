"""The app that functions.py measures as the peer: plain Celery, a process for every task, or a model in a global."""

from __future__ import annotations

import os

from functions_work import CALL_SECONDS, embed, make_model
from stock_celery import stock_app

app = stock_app(os.environ["REDIS_URL"])
#: The queue of the worker that keeps its model.
WARM_QUEUE = "warm"

_models: list[dict[int, int]] = []


@app.task(name="bench.cold")
def cold() -> int:
    """Return in which process it ran."""
    return os.getpid()


@app.task(name="bench.warm", queue=WARM_QUEUE)
def warm(number: int) -> int:
    """Ask the model that this worker has loaded."""
    if not _models:
        _models.append(make_model())
    return embed(_models[0], number, CALL_SECONDS)


@app.task(name="bench.empty", queue=WARM_QUEUE)
def empty(number: int) -> int:
    """Do nothing."""
    return number
