"""Rows against the limit of length, split into tokens many at a time; and which losses a training goes on with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from executors.base import ExecutorError
from executors.training.arguments import allows_non_finite_loss
from executors.training.lengths import Fit, scored, supervised


class Words:
    """A tokenizer whose tokens are words, with one before each text; it counts its calls, and the texts of them."""

    def __init__(self):
        self.calls, self.texts = 0, 0

    def __call__(self, texts, *, add_special_tokens):
        assert isinstance(texts, list)
        self.calls, self.texts = self.calls + 1, self.texts + len(texts)
        if any("\ud800" in text for text in texts):
            raise ValueError("surrogates not allowed")
        begin = ["<s>"] if add_special_tokens else []
        return {"input_ids": [[*begin, *text.split()] for text in texts]}

    def apply_chat_template(self, value, *, tools, tokenize, add_generation_prompt):
        return " ".join(f"{one['role']}: {one['content']}" for one in value) + (" assistant:" * add_generation_prompt)


ARGUMENTS = SimpleNamespace(max_length=8, packing=False, completion_only_loss=None)


def chat(*said):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=False)]


def test_rows_are_split_into_tokens_in_batches_and_told():
    words, told = Words(), []
    rows = [{"text": "one two three four five"}] * 10_000

    assert supervised(rows, words, ARGUMENTS, told.append) == Fit(rows=10_000)
    assert words.texts == 10_000
    assert words.calls < 50
    assert told[-1] == 10_000
    assert told == sorted(told)


@pytest.mark.parametrize("around", [0, 600])
def test_lost_and_cut_rows_are_counted_among_others_wherever_they_stand(around):
    fine = [{"prompt": "a b ", "completion": "c d e f"}] * around
    short = [{"prompt": "a", "completion": "b"}] * around
    rows = [
        *fine,
        {"prompt": "a b c d e f g h ", "completion": "i"},  # begin and prompt fill it
        *short,
        {"prompt": "a b ", "completion": "c d e f g h i"},
        {"prompt": chat("a b c"), "completion": chat("", "d e f g h i")[1:]},
        {"prompt": chat("a b c d e f g"), "completion": chat("", "d")[1:]},
        *fine,
    ]

    assert supervised(rows, Words(), ARGUMENTS, [].append) == Fit(rows=len(rows), lost=2, cut=2)


def test_both_answers_of_a_preference_count():
    rows = [
        {"prompt": "a b ", "chosen": "c", "rejected": "c d e f g h i j"},
        {"prompt": "a b ", "chosen": "c", "rejected": "d"},
    ]

    assert scored(rows, Words(), ARGUMENTS, [].append).lost == 1


def test_a_row_that_cannot_be_split_is_named():
    rows = [*[{"text": "one two three"}] * 700, {"text": "one two \ud800"}, {"text": "one two three"}]

    with pytest.raises(ExecutorError, match=r"data row 700: .*surrogates"):
        supervised(rows, Words(), ARGUMENTS, [].append)


@pytest.mark.parametrize(
    ("training", "allowed", "warnings"),
    [
        ({}, False, 0),
        ({"allow_non_finite_loss": True}, True, 0),
        ({"logging_nan_inf_filter": True}, True, 1),
        ({"logging_nan_inf_filter": False}, False, 0),
        ({"logging_nan_inf_filter": True, "allow_non_finite_loss": False}, False, 0),
    ],
)
def test_trl_s_filter_allows_losses_that_are_no_numbers(training, allowed, warnings):
    found, said = allows_non_finite_loss(training)

    assert (found, len(said)) == (allowed, warnings)
