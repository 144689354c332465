"""Finds, in the history of a training that ran to its end, that the model has collapsed or learned nothing. Pure.

What is found is a warning, not a failure: a short or a strange training may look so and be meant. Losses that are no
numbers fail a training while it runs (`executors.training.progress`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

Entry = Mapping[str, Any]

#: So many logs at the end must agree before they are taken as a state, not as one odd step.
LAST_LOGS: Final = 3
#: An evaluation loss this near to that of guessing, as a share of it, is one.
NEAR_GUESSING: Final = 0.01

_LEARNING_RATE: Final = "check training.learning_rate, and the data"
#: Measure -> what it means where it is 0 in all of the last logs.
_ZEROS: Final[Mapping[str, str]] = {
    "mean_token_accuracy": f"no token is predicted rightly: the model has collapsed; {_LEARNING_RATE}",
    "grad_norm": f"nothing is learned any more: the model has collapsed, or nothing is left to learn; {_LEARNING_RATE}",
    "reward_std": "all answers to a prompt have the same reward, so nothing is learned; check the reward, or sample at "
    "a higher generation.temperature",
}


def find_warnings(history: Sequence[Entry], *, eval_loss: float | None, vocabulary: int | None) -> list[str]:
    """Return what looks wrong in the history of a training (one entry a log), in sentences; none for a sound one.

    `eval_loss` is the loss in nats of an evaluation after the training, where it is the one of predicting tokens out of
    a `vocabulary` of that size: ln(vocabulary) is what guessing has.
    """
    return [*_collapsed(history), *_guessing(eval_loss, vocabulary), *_no_numbers(history)]


def _collapsed(history: Sequence[Entry]) -> list[str]:
    found = []
    for name, meaning in _ZEROS.items():
        values = [entry[name] for entry in history if name in entry]
        last = values[-LAST_LOGS:]
        if len(last) == LAST_LOGS and all(value == 0 for value in last):
            zeros = next((n for n, value in enumerate(reversed(values)) if value != 0), len(values))
            found.append(f"{name} is 0 in the last {zeros} logs: {meaning}")
    return found


def _guessing(eval_loss: float | None, vocabulary: int | None) -> list[str]:
    if eval_loss is None or not vocabulary or vocabulary < 2:
        return []
    guess = math.log(vocabulary)
    if not abs(eval_loss - guess) <= NEAR_GUESSING * guess:
        return []
    return [
        f"the evaluation loss {eval_loss:.4g} is that of guessing among {vocabulary} tokens ({guess:.4g}): the model "
        f"predicts nothing; {_LEARNING_RATE}"
    ]


def _no_numbers(history: Sequence[Entry]) -> list[str]:
    steps = [
        entry["step"] for entry in history if entry.get("loss", 0.0) is None or entry.get("eval_loss", 0.0) is None
    ]
    if not steps:
        return []
    return [
        f"the loss is no number in {len(steps)} logs, first at step {steps[0]}, and the training was told to go on "
        "(training.allow_non_finite_loss)"
    ]
