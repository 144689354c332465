"""Warnings about a training that ran to its end and taught nothing."""

from __future__ import annotations

import math

import pytest

from executors.training.health import find_warnings

SOUND = [{"step": n, "loss": 2.0 - n / 10, "grad_norm": 1.0, "mean_token_accuracy": 0.4} for n in range(1, 9)]


def _with(name, values):
    return [{**entry, name: value} for entry, value in zip(SOUND, values, strict=True)]


@pytest.mark.parametrize(
    ("history", "eval_loss", "says"),
    [
        (_with("grad_norm", [1, 1, 1, 1, 1, 0, 0, 0]), None, "grad_norm is 0 in the last 3 logs"),
        (_with("mean_token_accuracy", [0] * 8), None, "mean_token_accuracy is 0 in the last 8 logs"),
        (_with("reward_std", [0] * 8), None, "all answers to a prompt have the same reward"),
        (SOUND, math.log(504) * 1.004, "that of guessing among 504 tokens (6.223)"),
        (_with("loss", [1.0, None, None, 1.0, 1.0, 1.0, 1.0, 1.0]), None, "no number in 2 logs, first at step 2"),
    ],
)
def test_a_collapse_is_told(history, eval_loss, says):
    (found,) = find_warnings(history, eval_loss=eval_loss, vocabulary=504)

    assert says in found


@pytest.mark.parametrize(
    ("history", "eval_loss", "vocabulary"),
    [
        (SOUND, 1.2, 504),
        ([], None, None),
        (_with("grad_norm", [0, 0, 0, 0, 0, 0, 0, 1]), None, 504),
        (SOUND[:2], math.nan, 504),
        (SOUND, math.log(504), None),
        ([{"step": 1, "grad_norm": 0.0, "loss": 1.0}], None, 504),
    ],
    ids=["sound", "nothing", "recovers", "no-number", "another-measure", "one-log"],
)
def test_a_sound_training_has_no_warning(history, eval_loss, vocabulary):
    assert find_warnings(history, eval_loss=eval_loss, vocabulary=vocabulary) == []
