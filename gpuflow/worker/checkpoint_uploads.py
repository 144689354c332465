"""Uploads the checkpoints of one attempt while its child runs, and the newest one before the task is given back.

Started and finished by the supervisor, for a task whose results go to a store. It never fails the training: an upload
that fails is told in the task's events and tried again. What a checkpoint is in a store, `artifacts.checkpoint_store`
says.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from gpuflow.artifacts.checkpoint_store import CheckpointGone, drop_checkpoints, prune_checkpoints, upload_checkpoint
from gpuflow.artifacts.destination import is_at, stored_name
from gpuflow.artifacts.held_files import Rights, aside, forget_held, hold_tree
from gpuflow.artifacts.store import Store
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.protocol import CHECKPOINT_MARKER, Event, complete_checkpoints
from gpuflow.worker.attempt import Attempt
from gpuflow.worker.outcome import Outcome
from gpuflow.worker.results_folder import ResultsFolder

log = get_logger("gpuflow.checkpoints")

#: The folder is looked at this often, in seconds, beside the looks that an event of the child asks for.
LOOK_SECONDS: Final = 5.0
#: Longest pause after failures in a row, in seconds; each doubles the one before.
LONGEST_PAUSE_SECONDS: Final = 60.0
#: Tries of the last upload, and the pause between two of them in seconds.
LAST_TRIES: Final = 3
LAST_PAUSE_SECONDS: Final = 1.0
#: The last upload is given up when no byte went over for so long, in seconds; the lease is kept until then.
STALL_SECONDS: Final = 300.0
#: What an upload that was told to stop has to do so, in seconds; then it is left behind. It commits nothing.
_LEAVE_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.1


class _Stopped(Exception):
    """The upload under way is no longer wanted."""


class CheckpointUploads(threading.Thread):
    """Keeps the newest complete checkpoint of `folder` in a store. Call `start`, and `finish` when the child has ended.

    `within` is the folder above it that the task may not change: there the files of a checkpoint are held while they
    are uploaded, so that they stay though the trainer removes the checkpoint, and stay what they are though the task
    puts links in their places. They are opened with the `rights` of the task. `wanted` says whether the attempt is
    still ours, `end_by` when the worker means to be done with it (monotonic seconds; None: no limit), and `tell` puts a
    sentence into the task's events. `begun`: something was sent.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        within: Path,
        task_id: str,
        attempt: int,
        wanted: Callable[[], bool],
        rights: Rights = contextlib.nullcontext,
        end_by: Callable[[], float | None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(name=f"gpuflow-checkpoints-{task_id}", daemon=True)
        self._store, self._folder = store, folder
        self._within, self._rights = within, rights
        self._task_id, self._attempt = task_id, attempt
        self._wanted, self._end_by, self._tell = wanted, end_by, tell
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._dropped = threading.Event()
        self.begun = False
        self._stored: str | None = None
        self._failures = 0
        self._moved_at = time.monotonic()

    def look(self) -> None:
        """Look at the folder now: the child has told of a checkpoint."""
        self._wake.set()

    def finish(self, *, upload: bool) -> None:
        """Stop, after a last upload of the newest checkpoint if `upload`; the child has ended.

        That upload ends at `end_by`, when the attempt is no longer ours, or when it has stalled.
        """
        self._moved_at = time.monotonic()
        if not upload:
            self._dropped.set()
        self._closing.set()
        self._wake.set()
        while self.is_alive() and not self._over():
            self.join(_POLL_SECONDS)
        self._dropped.set()
        self._wake.set()
        self.join(_LEAVE_SECONDS)
        if self.is_alive():
            log.warning("checkpoint_upload_left_behind", task=self._task_id, attempt=self._attempt)

    def run(self) -> None:
        """Look and upload until told to finish."""
        while not self._closing.is_set():
            self._wake.wait(min(LOOK_SECONDS * 2**self._failures, LONGEST_PAUSE_SECONDS))
            self._wake.clear()
            if not self._closing.is_set():
                self._upload_newest()
        for _ in range(LAST_TRIES):
            if self._dropped.is_set() or self._upload_newest():
                return
            self._dropped.wait(LAST_PAUSE_SECONDS)

    def _upload_newest(self) -> bool:
        """Store the newest checkpoint that is not stored yet; False if that failed and may be tried again."""
        newest: Path | None = None
        try:
            while newest := self._newest():
                self._check()
                self.begun = True
                started = time.monotonic()
                # Gone: the trainer keeps a few, so there is a newer one.
                with contextlib.suppress(CheckpointGone), self._held(newest) as folder:
                    upload_checkpoint(self._store, folder, self._task_id, self._attempt, progress=self._moved)
                    self._stored, self._failures = newest.name, 0
                    self._note(newest, time.monotonic() - started)
                    prune_checkpoints(self._store, self._task_id, self._attempt)
        except _Stopped:
            if newest is not None:
                log.info("checkpoint_upload_stopped", task=self._task_id, attempt=self._attempt, name=newest.name)
        except (ArtifactError, OSError) as error:
            self._failures += 1
            name = newest.name if newest else "the checkpoints"
            log.warning("checkpoint_not_stored", task=self._task_id, attempt=self._attempt, cause=str(error))
            self._tell(f"{name}: not stored yet, it is tried again: {error}")
            return False
        except Exception:
            log.exception("checkpoint_uploads_stumbled", task=self._task_id, attempt=self._attempt)
            self._failures += 1
            return False
        return True

    @contextlib.contextmanager
    def _held(self, checkpoint: Path) -> Iterator[Path]:
        """Give a folder with the files of a checkpoint that nobody else changes. Raises CheckpointGone."""
        with aside(self._within, self._attempt) as own:
            held = own / checkpoint.name
            inside = checkpoint.relative_to(self._within).parts
            try:
                hold_tree(self._within, inside, held, last=CHECKPOINT_MARKER, rights=self._rights, progress=self._moved)
            except FileNotFoundError:
                raise CheckpointGone(f"{checkpoint} was removed before it could be stored") from None
            yield held

    def _newest(self) -> Path | None:
        found = complete_checkpoints(self._folder)
        return found[-1] if found and found[-1].name != self._stored else None

    def _note(self, checkpoint: Path, seconds: float) -> None:
        name = checkpoint.name
        log.info("checkpoint_stored", task=self._task_id, attempt=self._attempt, name=name, seconds=round(seconds, 2))
        self._tell(f"{name} is stored: another machine can go on from it")

    def _moved(self, _: int) -> None:
        self._moved_at = time.monotonic()
        self._check()

    def _check(self) -> None:
        if self._dropped.is_set() or (self._closing.is_set() and self._over()) or not self._wanted():
            raise _Stopped

    def _over(self) -> bool:
        """Say whether the time of the last upload is over."""
        now, end_by = time.monotonic(), self._end_by()
        return (
            self._dropped.is_set()
            or not self._wanted()
            or (end_by is not None and now >= end_by)
            or now - self._moved_at > STALL_SECONDS
        )


def begin_uploads(
    store: Store | None, attempt: Attempt, *, wanted: Callable[[], bool], rights: Rights
) -> CheckpointUploads | None:
    """Start the uploads of an attempt; None for a task without a store, or whose store is the results folder here."""
    task_id, holder = attempt.request.task_id, attempt.holder
    output_dir = Path(attempt.request.output_dir)
    folder = Path(attempt.request.checkpoint_dir or output_dir)
    if store is None or is_at(store, stored_name(task_id, holder.attempt, folder.name), folder):
        return None
    forget_held(output_dir.parent, below=holder.attempt)

    def tell(message: str) -> None:
        event = Event(name="log", data={"message": attempt.redactor.text(message)})
        try:
            attempt.ledger.report(task_id, holder, [event.to_json()])
        except RedisError as error:
            log.warning("events_not_reported", task=task_id, cause=str(error))

    uploads = CheckpointUploads(
        store,
        folder,
        within=output_dir.parent,
        task_id=task_id,
        attempt=holder.attempt,
        wanted=wanted,
        rights=rights,
        end_by=lambda: attempt.end_by,
        tell=tell,
    )
    attempt.on_checkpoint = uploads.look
    uploads.start()
    return uploads


def goes_on(outcome: Outcome) -> bool:
    """Say whether another attempt, or a retry by hand, may go on from what this one has done."""
    return not outcome.completed and outcome.stop not in ("cancelled", "lost", "superseded")


def forget_checkpoints(
    uploads: CheckpointUploads | None, store: Store | None, folder: ResultsFolder, task_id: str, attempt: int
) -> None:
    """Remove the checkpoints of a task that has succeeded from its store, and what was fetched of them."""
    folder.forget_fetched()
    if store is None or uploads is None or (attempt == 1 and not uploads.begun):
        return
    try:
        drop_checkpoints(store, task_id)
    except ArtifactError as error:
        log.warning("checkpoints_left_in_the_store", task=task_id, cause=str(error))
