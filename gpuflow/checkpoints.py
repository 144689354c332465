"""Checkpoint folders that can be trusted, whatever wrote what is in them: written whole, and removed whole.

Libraries write straight into `checkpoint-STEP/`, so a folder alone says nothing. It counts once it holds its marker
(gpuflow.protocol), which comes last: every file is on disk before, and the marker itself appears by rename. A folder
is removed in the other order. So a kill at any time leaves a whole checkpoint or a folder that nobody reads. Renaming
the whole folder instead would say the same, but Trainer writes the folder's name into its state (the best checkpoint).

For executors and functions; the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from gpuflow.protocol import CHECKPOINT_MARKER, complete_checkpoints, write_whole

_ATTEMPT: Final = re.compile(r"attempt-([0-9]+)")


def mark_complete(folder: Path, *, step: int, **more: Any) -> None:
    """Flush a written checkpoint to disk, then mark it as complete, with the steps done in it. Raises OSError.

    `more` stands beside the step in the marker: JSON, such as `max_steps`, the steps that there are in all.
    """
    flush(folder)
    write_whole(folder / CHECKPOINT_MARKER, json.dumps({"step": step, **more}).encode() + b"\n", synced=True)


def flush(folder: Path) -> None:
    """Make sure that a folder with all its files is on disk. Raises OSError."""
    folders = [folder]
    for path in folder.rglob("*"):
        if path.is_dir():
            folders.append(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in folders:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems refuse it for folders
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first. What cannot be removed stays behind without one."""
    (folder / CHECKPOINT_MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_old(folder: Path, *, keep: int, best: str | None = None) -> None:
    """Remove the oldest complete checkpoints beyond `keep`, never the newest one nor the `best`.

    Nothing is removed once a later attempt has its folder beside this one: it may have chosen any of them. Since that
    folder is made before the choice, and the newest checkpoint is marked before this look, one of both sees the other.
    """
    if _is_superseded(folder):
        return
    found = complete_checkpoints(folder)
    protected = {path for path in found if path == found[-1] or (best and path == Path(best))}
    excess = len(found) - max(keep, len(protected))
    for path in [path for path in found if path not in protected][: max(excess, 0)]:
        remove(path)


def _is_superseded(folder: Path) -> bool:
    """Say whether the attempt `attempt-N/` of a checkpoint folder is followed by one with a higher number."""
    number = _ATTEMPT.fullmatch(folder.parent.name)
    if number is None:
        return False
    others = [_ATTEMPT.fullmatch(entry.name) for entry in folder.parent.parent.iterdir()]
    return any(int(other[1]) > int(number[1]) for other in others if other)
