"""Notes which GPUs each attempt of a worker has, and from when to when (`--include attempt_spans`): one JSON line each.

The lines go to the file that ATTEMPT_SPANS names, in the order of their ends. The worker's own code knows nothing of
this: the attempt is wrapped from outside. An attempt has its GPUs from before its child begins until that is gone.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.spans import Span


def spans_in(path: Path) -> list[Span]:
    """Read what workers have noted."""
    from tests.support.spans import Span

    lines = path.read_text().splitlines() if path.exists() else []
    return [Span(**{**raw, "gpus": tuple(raw["gpus"])}) for raw in map(json.loads, lines)]


def _install(path: str) -> None:
    from gpuflow.worker.attempt import Attempt

    run = Attempt.run

    @functools.wraps(run)
    def noted(self: Attempt) -> Any:
        began_at = time.time()
        try:
            return run(self)
        finally:
            name = f"{self.request.task_id}/{self.request.attempt}"
            span = {"name": name, "gpus": self.request.gpus, "began_at": began_at, "ended_at": time.time()}
            with Path(path).open("a") as file:
                file.write(json.dumps(span) + "\n")

    Attempt.run = noted  # type: ignore[method-assign]


if os.environ.get("ATTEMPT_SPANS"):
    _install(os.environ["ATTEMPT_SPANS"])
