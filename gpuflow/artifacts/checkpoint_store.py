"""Checkpoints in a store, so that the next attempt of a task goes on where no disk is shared.

Called by the worker (`worker.checkpoint_uploads`, `worker.preparation`, the supervisor). It knows stores and folders;
not when to upload, and not what a lease is. The names are

    <task id>/attempt-<n>/checkpoints/checkpoint-STEP/<file>     the files, and last of all the marker
    <task id>/attempt-<n>/checkpoints/checkpoint-STEP.files.json their sizes and SHA-256, just before the marker

A checkpoint is there when its marker (gpuflow.protocol) is listed: that is put last and deleted first, so a process
that is killed between any two steps leaves a whole checkpoint, or files that nobody reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.destination import stored_name
from gpuflow.artifacts.several import several
from gpuflow.artifacts.store import Progress, Store, StoredFile, check_name
from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER, is_complete

#: Complete checkpoints of one attempt that a store keeps while the task runs: the newest, and one that may be in use.
KEEP: Final = 2
FOLDER: Final = "checkpoints"
_INDEX_SUFFIX: Final = ".files.json"
_NAME: Final = re.compile(rf"attempt-([0-9]{{1,9}})/{FOLDER}/(checkpoint-([0-9]{{1,18}}))/(.+)", re.DOTALL)


class CheckpointGone(ArtifactError):
    """A checkpoint that was there has been removed meanwhile: the store has an older one, or none."""


class CheckpointUnreachable(ArtifactError):
    """A store has a checkpoint, or may have one, and it cannot be brought here now; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint of a store: its attempt, its folder's name, and the steps that are done in it."""

    task_id: str
    attempt: int
    name: str
    step: int

    @property
    def place(self) -> str:
        """The name of its folder in the store."""
        return _place(self.task_id, self.attempt, self.name)


def upload_checkpoint(
    store: Store, folder: Path, task_id: str, attempt: int, *, progress: Progress | None = None
) -> None:
    """Store a complete checkpoint folder: its files, a few at once, then the index, and its marker last.

    No task may change the folder: `artifacts.held_files` makes one of the checkpoint of a task that runs.
    Raises CheckpointGone when the folder is removed meanwhile, ArtifactError for a file that cannot be stored and for a
    link, OSError.
    """
    files = _files_of(folder)
    try:
        marker = (folder / CHECKPOINT_MARKER).read_bytes()  # It goes first when a trainer removes the folder.
    except FileNotFoundError:
        raise CheckpointGone(f"{folder} was removed before it could be stored") from None
    place = _place(task_id, attempt, folder.name)

    def put(name: str, told: Progress) -> StoredFile:
        return store.put(folder / name, f"{place}/{name}", progress=told)

    index: dict[str, Any] = {CHECKPOINT_MARKER: {"bytes": len(marker), "sha256": hashlib.sha256(marker).hexdigest()}}
    try:
        for name, stored in zip(files, several(put, files, progress=progress), strict=True):
            index[name] = {"bytes": stored.size, "sha256": stored.sha256}
    except (ArtifactError, OSError):
        if not is_complete(folder):
            raise CheckpointGone(f"{folder} was removed while it was stored") from None
        raise
    with tempfile.TemporaryDirectory(prefix="gpuflow-checkpoint-") as aside:
        for name, content in ((place + _INDEX_SUFFIX, json.dumps(index).encode()), (_marker_of(place), marker)):
            source = Path(aside, "file")
            source.write_bytes(content)
            store.put(source, name, progress=progress)


def newest_stored(store: Store, task_id: str, *, below: int) -> StoredCheckpoint | None:
    """Return the newest complete checkpoint of an attempt under `below`; the latest attempt counts, then the step.

    Raises ArtifactError when the store cannot tell.
    """
    with tempfile.TemporaryDirectory(prefix="gpuflow-checkpoint-") as aside:
        while complete := [found for found in _complete(store, task_id) if found[0] < below]:
            attempt, _, name = max(complete)
            marker, target = _marker_of(_place(task_id, attempt, name)), Path(aside, uuid.uuid4().hex)
            try:
                store.get(marker, target)
            except ArtifactError:
                if store.list(marker):
                    raise
                continue  # It was removed after it was listed: look again.
            return StoredCheckpoint(task_id=task_id, attempt=attempt, name=name, step=_step(target, name))
    return None


def fetch_checkpoint(store: Store, found: StoredCheckpoint, target: Path, *, progress: Progress | None = None) -> Path:
    """Bring a checkpoint to the folder `target`, which appears whole, by rename; one that is there is used again.

    Raises CheckpointGone when the store no longer has it, ArtifactError for a file that cannot be fetched, has other
    bytes than it was stored with, or would lie outside `target`; OSError.
    """
    if is_complete(target):
        return target
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        digests = _contents(store, found, staging)

        def get(name: str, told: Progress | None) -> StoredFile:
            return store.get(f"{found.place}/{name}", staging / name, sha256=digests[name], progress=told)

        several(get, sorted(digests.keys() - {CHECKPOINT_MARKER}), progress=progress)
        get(CHECKPOINT_MARKER, progress)
        shutil.rmtree(target, ignore_errors=True)  # without a marker: not from here
        staging.rename(target)
    except ArtifactError:
        if not store.list(_marker_of(found.place)):
            raise CheckpointGone(f"{found.place} has been removed from the store") from None
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def prune_checkpoints(store: Store, task_id: str, attempt: int, *, keep: int = KEEP) -> None:
    """Delete what an attempt has stored, but its newest `keep` complete checkpoints. Raises ArtifactError.

    For the process that uploads: what is not complete is taken for the rest of an upload that broke off.
    """
    files = store.list(f"{task_id}/attempt-{attempt}/{FOLDER}")
    complete = sorted((step, name) for _, step, name in _complete_in(files, task_id))
    kept = {name for _, name in complete[-keep:]}
    for name in sorted({match[2] for file in files if (match := _match(file, task_id))} - kept):
        _delete(store, _place(task_id, attempt, name))


def drop_checkpoints(store: Store, task_id: str) -> int:
    """Delete all checkpoints of a task, and return how many of them were complete. Raises ArtifactError."""
    files = store.list(task_id)
    complete = _complete_in(files, task_id)
    for attempt, _, name in complete:
        store.delete(_marker_of(_place(task_id, attempt, name)))
    for number in sorted({int(match[1]) for file in files if (match := _match(file, task_id))}):
        store.delete(f"{task_id}/attempt-{number}/{FOLDER}")
    return len(complete)


def _place(task_id: str, attempt: int, name: str) -> str:
    return stored_name(task_id, attempt, f"{FOLDER}/{name}")


def _marker_of(place: str) -> str:
    return f"{place}/{CHECKPOINT_MARKER}"


def _match(file: StoredFile, task_id: str) -> re.Match[str] | None:
    return _NAME.fullmatch(file.name.removeprefix(f"{task_id}/"))


def _complete(store: Store, task_id: str) -> list[tuple[int, int, str]]:
    return _complete_in(store.list(task_id), task_id)


def _complete_in(files: list[StoredFile], task_id: str) -> list[tuple[int, int, str]]:
    """Return attempt, step by the name, and name of each complete checkpoint."""
    matches = [match for file in files if (match := _match(file, task_id)) and match[4] == CHECKPOINT_MARKER]
    return [(int(match[1]), int(match[3]), match[2]) for match in matches]


def _delete(store: Store, place: str) -> None:
    for name in (_marker_of(place), place + _INDEX_SUFFIX, place):
        store.delete(name)


def _step(marker: Path, name: str) -> int:
    """Return the step that a marker tells; the one in the folder's name for a marker that tells none."""
    try:
        told = json.loads(marker.read_bytes())["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        told = None
    return told if isinstance(told, int) and not isinstance(told, bool) else int(name.rpartition("-")[2])


def _files_of(folder: Path) -> list[str]:
    """Return the names of the files of a checkpoint, without its marker. Raises ArtifactError for a link."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ArtifactError(f"{path} is a link; put the file itself there")
        name = path.relative_to(folder).as_posix()
        if name != CHECKPOINT_MARKER and not path.is_dir():
            names.append(name)
    return names


def _contents(store: Store, found: StoredCheckpoint, staging: Path) -> Mapping[str, str | None]:
    """Return the names of a checkpoint's files, below its folder, with their digests as far as they are known."""
    index = found.place + _INDEX_SUFFIX
    if store.list(index):
        path = staging.with_name(f"{staging.name}.json")
        try:
            store.get(index, path)
            listed = {str(name): str(entry["sha256"]) for name, entry in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{index} cannot be read: {error!r}; delete {found.place} in the store") from error
        finally:
            path.unlink(missing_ok=True)
    else:  # A results folder that is itself the store.
        listed = {file.name.removeprefix(f"{found.place}/"): file.sha256 for file in store.list(found.place)}
    if CHECKPOINT_MARKER not in listed:
        raise CheckpointGone(f"{found.place} has been removed from the store")
    return {check_name(name): digest or None for name, digest in listed.items()}
