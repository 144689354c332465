"""Counts the calls of `/v1` by model, for the metrics (`gpuflow.metrics`)."""

from __future__ import annotations

from typing import Any, Literal

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script, script_text

#: `cancelled`: its client left, or somebody cancelled its task; `refused`: there was no task.
Outcome = Literal["answered", "failed", "cancelled", "refused"]


def count_call(client: Any, keys: Keys, model: str, outcome: Outcome, first_token_seconds: float | None = None) -> None:
    """Count a call that has ended; with the time to its first text where it was streamed. Raises redis errors."""
    first = "" if first_token_seconds is None else f"{first_token_seconds:.6f}"
    step = load_script("gpuflow.serving", "count_call", script_text("gpuflow.broker", "common"))
    step(client, [keys.ready], [model, outcome, first])
