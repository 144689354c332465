"""Tells the supervisor how a training goes, and keeps the history of its losses."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from executors import cancellation
from executors.base import ExecutorError
from gpuflow.protocol import Emitter

#: A log with none of these is no log of a step.
_LOSSES: Final = ("loss", "eval_loss")
#: Our names of what TRL's PPO logs under its own.
_OF_PPO: Final = {
    "loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "reward": "objective/scores",
    "kl": "objective/kl",
    "learning_rate": "lr",
}
#: Numbers of a log that are passed on: of every trainer, of preferences and rewards, of those that generate.
_REPORTED: Final = frozenset(
    {
        *_LOSSES, "learning_rate", "grad_norm", "epoch", "mean_token_accuracy", "entropy",
        "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "eval_rewards/accuracies",
        "eval_rewards/margins", "accuracy", "margin", "mean_reward", "eval_accuracy", "eval_margin",
        "reward", "reward_std", "eval_reward", "kl", "completions/mean_length", "value_loss",
    }
)  # fmt: skip


class Progress(TrainerCallback):
    """Emits a progress event for every log of the trainer; `history` holds the same numbers, one entry a log.

    A value that is no finite number is None in the history, and left out of the event.
    """

    def __init__(self, emitter: Emitter, *, fails_on_nan: bool = False) -> None:
        self._emitter = emitter
        self._fails_on_nan = fails_on_nan
        self._tokens = 0.0
        self._at = time.monotonic()
        self.history: list[dict[str, float | None]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of the speed; a resumed training goes on with the history of its checkpoint."""
        self._at = time.monotonic()
        if state.global_step:
            self.history += [
                {"step": log["step"], **numbers} for log in state.log_history if (numbers := _numbers(log))
            ]
        if state.is_world_process_zero:
            self._emitter.progress(state.global_step, state.max_steps, "step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End a cancelled training even where a library swallowed the signal."""
        cancellation.check()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Pass on the numbers of one log. Raises ExecutorError: NonFiniteLoss, unless the task allows such losses."""
        logs = dict(logs or {})
        logs |= {name: logs[theirs] for name, theirs in _OF_PPO.items() if theirs in logs}
        if self._fails_on_nan:
            _check_finite(logs, state.global_step, rows=getattr(args, "local_batch_size", None))
        numbers = _numbers(logs)
        if not state.is_world_process_zero or not numbers:
            return
        if "loss" in logs and logs.get("num_tokens"):
            numbers["tokens_per_second"] = self._speed(float(logs["num_tokens"]))
        self.history.append({"step": state.global_step, **numbers})
        if state.max_steps:
            finite = {name: value for name, value in numbers.items() if value is not None}
            self._emitter.progress(state.global_step, state.max_steps, "step", **finite)

    def mean_loss(self) -> float | None:
        """Return the mean of the logged losses that are numbers, of all attempts; None without one."""
        losses = [loss for entry in self.history if (loss := entry.get("loss")) is not None]
        return fmean(losses) if losses else None

    def _speed(self, tokens: float) -> float:
        now = time.monotonic()
        speed = (tokens - self._tokens) / max(now - self._at, 1e-6)
        self._tokens, self._at = tokens, now
        return round(speed, 1)


def _check_finite(logs: Mapping[str, Any], step: int, *, rows: int | None) -> None:
    """Raise ExecutorError for a loss that is no number. `rows` is the batch of ppo, which is scaled by its variance."""
    for name in _LOSSES:
        value = logs.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            alone = "an answer of one token in a batch of one has no variance, so raise batch_size; or " * (rows == 1)
            raise ExecutorError(
                "NonFiniteLoss",
                f"{name} is {value} at step {step}: {alone}the training has diverged; use a smaller "
                "training.learning_rate, set max_grad_norm, or train in float32 or bf16 instead of fp16 "
                "(training.allow_non_finite_loss: true trains on)",
            )


def _numbers(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a log that are passed on, None for NaN and infinities; nothing for a log without a loss."""
    if not set(_LOSSES) & set(logs):
        return {}
    found = {name: value for name, value in logs.items() if name in _REPORTED and isinstance(value, int | float)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
