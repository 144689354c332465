"""Which checkpoint a task goes on from, and where its own ones belong. What a whole one is, `gpuflow.checkpoints` says.

For executors; the standard library alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from executors.base import ExecutorError
from gpuflow.protocol import CHECKPOINT_MARKER, Request, complete_checkpoints, is_complete


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its folder, the steps done in it, and the steps that there are in all."""

    path: Path
    step: int
    max_steps: int

    @property
    def finished(self) -> bool:
        """No step is left."""
        return self.step >= self.max_steps


def folder_of(request: Request) -> Path:
    """Return the folder in which the checkpoints of this attempt belong."""
    return Path(request.checkpoint_dir or Path(request.output_dir) / "checkpoints")


def to_resume(resume_from: str | None) -> Checkpoint | None:
    """Return the checkpoint to go on from: the folder itself, or the newest complete one in it; None for a fresh start.

    Raises ExecutorError: CheckpointMissing, which is retryable, since a worker looks for the newest one each time.
    """
    if not resume_from:
        return None
    folder = Path(resume_from)
    path = folder if is_complete(folder) else next(reversed(complete_checkpoints(folder)), None)
    if path is None:
        raise _missing(f"{folder} holds no complete checkpoint to resume from")
    try:
        marker = json.loads((path / CHECKPOINT_MARKER).read_text("utf-8"))
        return Checkpoint(path=path, step=int(marker["step"]), max_steps=int(marker["max_steps"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _missing(f"{path / CHECKPOINT_MARKER} cannot be read: {error}; remove that folder") from error


def _missing(message: str) -> ExecutorError:
    return ExecutorError("CheckpointMissing", message, retryable=True)
