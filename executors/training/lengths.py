"""Finds the rows of which a trainer's limit of length leaves nothing, or not all, before a model is loaded.

The rules are TRL's: what each trainer counts as one sequence, and which rows it drops. Only rows that may be longer
than the limit are split into tokens: a token stands for one byte at least.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.base import bad_input

Row = Mapping[str, Any]
#: Lengths of a row in tokens: of what comes before the first token that counts for the loss, and of the whole.
Lengths = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How many of `rows` are `lost`, because nothing to learn from is left of them, and how many are `cut`."""

    rows: int
    lost: int = 0
    cut: int = 0
    why: str = "have no completion left within"


class Meter:
    """Counts tokens of texts and chats as TRL's trainers do, with the tokenizer of the model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, value: Any, tools: Any, *, asks: bool = False) -> str:
        """Return a chat as its template writes it; `asks` ends it where an answer begins. A text stays as it is."""
        if isinstance(value, str):
            return value
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return str(self._tokenizer.apply_chat_template(value, tools=tools, tokenize=False, add_generation_prompt=asks))

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text; `special` adds those that the tokenizer puts around every text."""
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def supervised(rows: Sequence[Row], tokenizer: Any, arguments: Any) -> Fit:
    """Return how rows as SFTTrainer takes them fit into `arguments.max_length`."""
    if getattr(arguments, "packing", False):
        return Fit(rows=len(rows))
    meter = Meter(tokenizer)
    completion_only = arguments.completion_only_loss is not False

    def lengths(row: Row, limit: int) -> Lengths | None:
        if "prompt" not in row:
            whole = row.get("messages", row.get("text"))
            return _lengths(meter, "", whole, row.get("tools"), limit)
        prompt = row["prompt"] if completion_only else ""
        return _lengths(meter, prompt, row["prompt"] + row["completion"], row.get("tools"), limit)

    return _fit(rows, arguments.max_length, lengths, keeps=lambda before, whole, limit: before < min(whole, limit))


def preferences(rows: Sequence[Row], tokenizer: Any, arguments: Any) -> Fit:
    """Return how rows as DPOTrainer takes them fit: one whose prompt fills the limit is dropped, answers are cut."""
    from trl.data_utils import extract_prompt

    meter = Meter(tokenizer)

    def lengths(row: Row, limit: int) -> Lengths | None:
        row = row if "prompt" in row else extract_prompt(dict(row))
        both = [
            _lengths(meter, row["prompt"], row["prompt"] + row[answer], row.get("tools"), limit)
            for answer in ("chosen", "rejected")
        ]
        known = [one for one in both if one]
        return (min(before for before, _ in known), max(whole for _, whole in known)) if known else None

    return _fit(rows, arguments.max_length, lengths, keeps=lambda before, whole, limit: before < limit)


def scored(rows: Sequence[Row], tokenizer: Any, arguments: Any) -> Fit:
    """Return how rows as RewardTrainer takes them fit: one with an answer that is longer than the limit is dropped."""
    meter = Meter(tokenizer)

    def lengths(row: Row, limit: int) -> Lengths | None:
        begin = row.get("prompt", row["chosen"][:0])
        both = [_lengths(meter, "", begin + row[answer], row.get("tools"), limit) for answer in ("chosen", "rejected")]
        known = [whole for _, whole in filter(None, both)]
        return (0, max(known)) if known else None

    found = _fit(rows, arguments.max_length, lengths, keeps=lambda before, whole, limit: whole <= limit)
    return replace(found, why="have an answer that is longer than")


def _lengths(meter: Meter, prompt: Any, whole: Any, tools: Any, limit: int) -> Lengths | None:
    """Return the lengths of a row, None where even one token a byte would not reach the limit."""
    is_text = isinstance(whole, str)
    text = meter.text(whole, tools)
    if len(text.encode("utf-8", "replace")) + 2 < limit:  # an end and a begin
        return None
    end = 1 if is_text else 0  # the trainers put an end after texts, the template after chats
    tokens = meter.tokens(text, special=is_text)
    before = meter.tokens(meter.text(prompt, tools, asks=True), special=is_text) if prompt else []
    common = next((n for n, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), None)
    return min(len(before), len(tokens)) if common is None else common, len(tokens) + end


def _fit(
    rows: Sequence[Row],
    limit: int | None,
    lengths: Callable[[Row, int], Lengths | None],
    *,
    keeps: Callable[[int, int, int], bool],
) -> Fit:
    if limit is None:
        return Fit(rows=len(rows))
    lost = cut = 0
    for before, whole in _measured(rows, limit, lengths):
        kept = keeps(before, whole, limit)
        lost += not kept
        cut += kept and whole > limit
    return Fit(rows=len(rows), lost=lost, cut=cut)


def _measured(rows: Sequence[Row], limit: int, lengths: Callable[[Row, int], Lengths | None]) -> Iterator[Lengths]:
    for index, row in enumerate(rows):
        try:
            found = lengths(row, limit)
        except Exception as error:  # a template is a program of the model's author
            raise bad_input(f"data row {index}: the chat template cannot write it: {str(error)[:300]}") from error
        if found:
            yield found


def check_fit(fit: Fit, limit: Any, side: str) -> str | None:
    """Return what to say of rows that are lost, None for none. Raises ExecutorError: BadInput where all are."""
    if not fit.lost:
        return None
    said = f"{fit.lost} of {fit.rows} rows {fit.why} training.max_length {limit}"
    if fit.lost == fit.rows:
        raise bad_input(f"data ({side}): {said}; raise it, or give shorter rows")
    return said
