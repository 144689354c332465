"""Removes from a results folder what `retention` decides: lists it, asks Redis, and deletes what is ours alone.

Called by the worker's housekeeping, and by whatever else keeps a results folder. It never follows a link, never leaves
the folder, and knows a task's folder by its name and an `attempt-N` in it. Without an answer of Redis nothing goes: a
record that cannot be read is not one that has gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.broker.keys import Keys
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.pipelines.records import PipelineState
from gpuflow.protocol import is_safe_id
from gpuflow.upkeep.retention import Listing, RecordView, Removal, TaskFolder, Upload, decide
from gpuflow.upkeep.turns import turn

log = get_logger("gpuflow.retention")

_ATTEMPT: Final = re.compile(r"attempt-([0-9]{1,9})")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
#: The turns of those who clean.
_LOCK: Final = f"{RESERVED_PREFIX}cleaning"
#: What is being deleted: renamed first, so that no reader finds half of it.
_REMOVED: Final = f"{RESERVED_PREFIX}removed-"
#: Side files that the gateway keeps for each task.
_SIDE_FOLDERS: Final = (f"{RESERVED_PREFIX}gateway/digests", f"{RESERVED_PREFIX}gateway/parts")
_CHUNK: Final = 500


class ResultsCleaner:
    """Cleans one results folder; several processes that share it take turns. `client` decodes responses."""

    def __init__(self, client: Any, keys: Keys, results_dir: Path, *, retention_seconds: float) -> None:
        self._client = client
        self._keys = keys
        self._root = results_dir
        self._retention_seconds = retention_seconds

    def run(self, *, every_seconds: float = 0, now: float | None = None, spare: Collection[str] = ()) -> list[Removal]:
        """Clean once, unless another process does, or somebody has in the last `every_seconds`; return what has gone.

        `spare` are tasks to leave alone. Raises redis errors, OSError for a folder that cannot be read.
        """
        now = time.time() if now is None else now
        folders, uploads = list(_task_folders(self._root, deep=False)), list(_uploads(self._root))
        if not folders and not uploads:
            return []
        with turn(self._root / _LOCK, every_seconds, now) as ours:
            if not ours:
                return []
            for path in _removed_before(self._root):
                _delete(path)
            chosen = self._decide(folders, uploads, now)
            ids = {removal.task_id for removal in chosen}
            # Once more, by the files in them: an attempt that writes may leave the folders around it unchanged.
            looked_into = [_task_folder(self._root / task_id, deep=True) for task_id in sorted(ids) if task_id]
            old = [upload for upload in uploads if any(one.path == f"uploads/{upload.sha256}" for one in chosen)]
            certain = self._decide([folder for folder in looked_into if folder is not None], old, now)
            return [removal for removal in certain if removal.task_id not in spare and self._remove(removal)]

    def _decide(self, folders: Sequence[TaskFolder], uploads: Sequence[Upload], now: float) -> list[Removal]:
        expired = [upload for upload in uploads if now - upload.written_at > self._retention_seconds]
        listing = Listing(
            folders=folders,
            uploads=expired,
            records=self._records([folder.task_id for folder in folders]),
            mentioned=self._mentioned({upload.sha256 for upload in expired}),
        )
        return decide(listing, now=now, retention_seconds=self._retention_seconds)

    def _records(self, ids: Sequence[str]) -> Mapping[str, RecordView]:
        """Return the records that exist. Raises redis errors."""
        found = {}
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            pipe = self._client.pipeline(transaction=False)
            for task_id in chunk:
                pipe.hmget(self._keys.task(task_id), "state", "attempt", "finished_at", "pipeline")
                pipe.ttl(self._keys.task(task_id))
            answers = pipe.execute()
            for task_id, fields, seconds in zip(chunk, answers[::2], answers[1::2], strict=True):
                if seconds != -2:  # Redis: no such key
                    found[task_id] = _view(fields, seconds, needed=seconds == -1 and self._runs(fields[3]))
        return found

    def _runs(self, pipeline_id: str | None) -> bool:
        """Whether there is such a pipeline, and it has not ended. Raises redis errors."""
        state = self._client.hget(self._keys.pipeline(pipeline_id), "state") if pipeline_id else None
        return bool(state == PipelineState.RUNNING)

    def _mentioned(self, uploads: Collection[str]) -> set[str]:
        """Return those of `uploads` that tasks and pipelines name which have not ended. Raises redis errors."""
        if not uploads:
            return set()
        texts: list[str] = []
        for task_id in self._client.smembers(self._keys.unfinished):
            texts.append(str(self._client.hget(self._keys.task(task_id), "spec")))
        for pipeline_id in self._client.zrange(self._keys.pipelines, 0, -1):
            fields = self._client.hgetall(self._keys.pipeline(pipeline_id))
            if fields.get("state") == PipelineState.RUNNING:
                texts.append(str(fields))
        return {sha256 for sha256 in uploads if any(sha256 in text for text in texts)}

    def _remove(self, removal: Removal) -> bool:
        path = self._root / removal.path
        gone = self._root / f"{_REMOVED}{os.getpid()}-{removal.path.replace('/', '-')[:150]}"
        try:
            path.rename(gone)
        except OSError as error:
            log.warning("not_removed", path=str(path), cause=str(error))
            return False
        _delete(gone)
        if removal.task_id and removal.path == removal.task_id:
            for folder in _SIDE_FOLDERS:
                _delete(self._root / folder / removal.task_id)
        log.info("removed", path=str(path), why=removal.why)
        return True


def _view(fields: Sequence[str | None], seconds: int, *, needed: bool) -> RecordView:
    state, attempt, finished_at, _ = fields
    try:
        known = TaskState(str(state))
    except ValueError:  # of a newer version: not to be judged
        known = TaskState.RUNNING
    return RecordView(
        state=known,
        attempt=int(attempt or 0),
        finished_at=float(finished_at) if finished_at else None,
        expires=seconds >= 0,
        needed=needed,
    )


def _task_folders(root: Path, *, deep: bool) -> Iterator[TaskFolder]:
    for item in _scan(root):
        if is_safe_id(item.name) and item.is_dir(follow_symlinks=False):
            folder = _task_folder(Path(item.path), deep=deep)
            if folder is not None:
                yield folder


def _task_folder(path: Path, *, deep: bool) -> TaskFolder | None:
    """Return the folder of a task, None for any other; `deep` looks at every file in it."""
    attempts = {}
    written_at = 0.0
    with contextlib.suppress(OSError):
        written_at = path.lstat().st_mtime
    for item in _scan(path):
        match = _ATTEMPT.fullmatch(item.name)
        with contextlib.suppress(OSError):
            at = _newest(Path(item.path)) if deep else item.stat(follow_symlinks=False).st_mtime
            if match and item.is_dir(follow_symlinks=False):
                attempts[int(match[1])] = at
            else:
                written_at = max(written_at, at)
    return TaskFolder(task_id=path.name, written_at=written_at, attempts=attempts) if attempts else None


def _uploads(root: Path) -> Iterator[Upload]:
    if (root / "uploads").is_symlink():
        return
    for item in _scan(root / "uploads"):
        if _SHA256.fullmatch(item.name) and not item.is_symlink():
            yield Upload(sha256=item.name, written_at=_newest(Path(item.path)))


def _newest(path: Path) -> float:
    """Return when anything in a folder, or a file, was written last; links are not followed. Raises OSError."""
    newest = path.lstat().st_mtime
    for at, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, Path(at, name).lstat().st_mtime)
    return newest


def _scan(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _removed_before(root: Path) -> list[Path]:
    return [Path(item.path) for item in _scan(root) if item.name.startswith(_REMOVED)]


def _delete(path: Path) -> None:
    """Delete a folder or file, as far as the disk lets us; what stays goes the next time."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return
    if is_folder:
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
