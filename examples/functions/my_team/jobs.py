"""Functions of a team: `celery -A gpuflow worker --include my_team.jobs`. Put your own work into their bodies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import chain

from gpuflow import app


@app.task(child=True)
def parse(path: str) -> list[str]:
    """Return the lines of a file. In a child without a GPU: a limit ends it, whatever it waits for."""
    return Path(path).read_text(encoding="utf-8").splitlines()


@app.task(resources="24GB+")
def embed(lines: list[str]) -> dict[str, Any]:
    """Return a vector for each line, and the GPUs of this call: its own alone. In a child with a GPU."""
    return {"vectors": [[float(len(line))] for line in lines], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}


@app.task
def count(embedded: dict[str, Any]) -> int:
    """Return how many vectors there are. In a thread of the worker."""
    return len(embedded["vectors"])


def index(path: str) -> Any:
    """Return the whole work on one file: `index("notes.txt").delay().get()`."""
    return chain(parse.s(path), embed.s(), count.s())
