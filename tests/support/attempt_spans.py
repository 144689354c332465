"""Notes which GPUs each attempt of a worker has, and from when to when (`--include attempt_spans`): one JSON line each.

The lines go to the file that ATTEMPT_SPANS names, in the order of their ends. The worker's own code knows nothing of
this: the attempt is wrapped from outside. An attempt has its GPUs from before its child begins until that is gone; a
call of a warm process has them until it is told of its end: where the process has died, the GPUs are free then.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
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
    from gpuflow.worker.sessions.request import SessionRequest

    run = Attempt.run
    for name in ("end", "ended_with"):
        setattr(SessionRequest, name, _noting_end(getattr(SessionRequest, name)))

    @functools.wraps(run)
    def noted(self: Attempt) -> Any:
        began_at = time.time()
        try:
            return run(self)
        finally:
            name = f"{self.request.task_id}/{self.request.attempt}"
            ended_at = getattr(self._child, "noted_end", None) or time.time()
            span = {"name": name, "gpus": self.request.gpus, "began_at": began_at, "ended_at": ended_at}
            with Path(path).open("a") as file:
                file.write(json.dumps(span) + "\n")

    Attempt.run = noted  # type: ignore[method-assign]


def _noting_end(end: Callable[..., None]) -> Callable[..., None]:
    """Return how a request to a session ends, which notes when that was first."""

    @functools.wraps(end)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        self.noted_end = getattr(self, "noted_end", None) or time.time()
        end(self, *args, **kwargs)

    return noted


if os.environ.get("ATTEMPT_SPANS"):
    _install(os.environ["ATTEMPT_SPANS"])
