"""Checkpoints that can be trusted: one counts only when its marker is there, and the marker comes last, by rename."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from executors.base import bad_input, write_json_atomically
from gpuflow.protocol import Emitter

#: Written into a checkpoint folder when all of it is on disk.
MARKER: Final = "complete.json"
_NAME: Final = re.compile(r"checkpoint-(\d+)")


class MarkComplete(TrainerCallback):
    """Marks each checkpoint as complete once the trainer has written it."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Flush the new checkpoint to disk, then mark it."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if not state.is_world_process_zero or not folder.is_dir():
            return
        flush(folder)
        write_json_atomically(folder / MARKER, {"step": state.global_step, "max_steps": state.max_steps})
        self._emitter.emit("checkpoint", path=str(folder), step=state.global_step)


def flush(folder: Path) -> None:
    """Make sure that every file of a folder is on disk. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the oldest first."""
    found = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and (path / MARKER).is_file()
    ]
    return [path for _, path in sorted(found)]


def to_resume(resume_from: str | None) -> str | None:
    """Return the checkpoint to go on from: the folder itself, or the newest complete one in it; None for a fresh start.

    Raises ExecutorError: BadInput for a folder that holds none.
    """
    if not resume_from:
        return None
    folder = Path(resume_from)
    if (folder / MARKER).is_file():
        return str(folder)
    found = complete(folder)
    if not found:
        raise bad_input(f"{folder} holds no complete checkpoint to resume from")
    return str(found[-1])
