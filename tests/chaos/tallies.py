"""Celery tasks of the chaos tests (`--include tallies`): bodies of chords that count how often they ran, in Redis."""

from __future__ import annotations

from typing import Any

from gpuflow import app


@app.task
def tally(results: list[Any], key: str) -> list[Any]:
    """Note a run in the list `key`, and return the outputs of the header."""
    outputs = [result["output"] for result in results]
    app.redis.rpush(key, len(outputs))
    return outputs
