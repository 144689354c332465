"""Trainer's checkpoints: each is marked when it is complete, and a notice (SIGUSR1) makes one and ends the training.

Where the user has not said when to save, the clock does: a training that a machine takes with it loses minutes.

Called by the training executors. What a complete checkpoint is, `gpuflow.checkpoints` says.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from executors import cancellation
from executors.checkpoints import Checkpoint
from executors.distributed.agreement import Votes, all_written, check_gradients, is_first
from gpuflow.checkpoints import mark_complete, remove_old
from gpuflow.protocol import Emitter, is_complete

#: Time from one checkpoint to the next where the user has not said when to save, in seconds.
SAVE_EVERY_SECONDS: Final = 600.0
#: Largest part of the time that goes into saving by the clock.
SAVING_SHARE: Final = 0.1


class Checkpoints(TrainerCallback):
    """Marks each checkpoint as complete once Trainer has written it, and ends the training after a notice.

    It also removes old ones (`save_total_limit`), which Trainer itself would do before the new one is complete. With
    `by_clock` it has one saved every SAVE_EVERY_SECONDS, and less often where saving takes more than SAVING_SHARE of
    that time.
    """

    def __init__(
        self,
        emitter: Emitter,
        arguments: TrainingArguments,
        *,
        by_clock: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emitter = emitter
        self._keep, arguments.save_total_limit = arguments.save_total_limit, None
        self._by_clock, self._clock = by_clock, clock
        self._save_at, self._saving_since = math.inf, math.nan
        self._votes = Votes(2)
        self._is_due = self._asked = self._checked = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._save_at = self._clock() + SAVE_EVERY_SECONDS

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the new checkpoint, tell of it, and remove what is too many."""
        try:
            self._mark(args, state)
        finally:
            now = self._clock()
            took = now - self._saving_since if self._saving_since <= now else 0.0
            self._save_at = now + max(SAVE_EVERY_SECONDS, took / SAVING_SHARE)
            self._is_due = self._asked = False

    def _mark(self, args: TrainingArguments, state: TrainerState) -> None:
        folder = _folder(args, state)
        all_written()
        if not state.is_world_process_zero or not folder.is_dir():
            return
        mark_complete(folder, step=state.global_step, max_steps=state.max_steps)
        self._emitter.checkpoint(str(folder), state.global_step)
        if self._keep and self._keep > 0:
            remove_old(folder.parent, keep=self._keep, best=state.best_model_checkpoint)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make sure, before the first step, that several ranks train one model."""
        if not self._checked and not args.fsdp:
            self._checked = True
            check_gradients(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave after a notice: the step is done, all of it is in the model and the optimizer. Else save when due."""
        asks = self._by_clock and not self._asked and is_first() and self._clock() >= self._save_at
        self._asked = self._asked or asks
        self._vote(asks)
        if self._is_due and state.global_step < state.max_steps:
            control.should_save = True
        self._saving_since = self._clock()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saving comes after an evaluation."""
        self._saving_since = self._clock()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave an evaluation as well; it stands between two steps."""
        self._vote(False)

    def _vote(self, asks_to_save: bool) -> None:
        """Leave if any rank was given notice, note that a checkpoint is due if the first one says so: all, or none."""
        noticed, is_due = self._votes.cast(cancellation.noticed(), asks_to_save)
        self._is_due = self._is_due or is_due
        if noticed:
            raise cancellation.Preempted


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


@contextmanager
def saved_on_notice(trainer: Any, resumed: Checkpoint | None, emitter: Emitter) -> Iterator[None]:
    """Within, a notice ends the work between two steps, with a complete checkpoint of what is done.

    Raises Preempted then. A notice that comes when only the saving of the result is left changes nothing: that is
    shorter than a checkpoint.
    """
    with cancellation.notice_held():
        try:
            yield
        except cancellation.Preempted:
            saved = _save(trainer, resumed.step if resumed else 0, emitter)
            cancellation.preempt(saved)


def _save(trainer: Any, start: int, emitter: Emitter) -> str:
    """Write a checkpoint of this moment and return what to say of it."""
    state, folder = trainer.state, _folder(trainer.args, trainer.state)
    done = f"the worker gave notice at step {state.global_step} of {state.max_steps}"
    if state.global_step <= start:
        return f"{done}; no step was done in this attempt"
    if not is_complete(folder):
        emitter.status("checkpointing", f"{done}; saving a checkpoint")
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.callback_handler.on_save(trainer.args, state, trainer.control)
        except Exception as error:  # noqa: BLE001  (the attempt ends in any case; the traceback is in the log)
            traceback.print_exception(error)
            return f"{done}; its checkpoint could not be saved: {error}"
    return f"{done}; its checkpoint is in {folder}"


def take_no_step(trainer: Any) -> None:
    """Let `train` load a checkpoint and take no step; Trainer would take one more where none is left in an epoch."""
    trainer._run_epoch = lambda **_: None
