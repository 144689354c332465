"""Finds the rows of which a trainer's limit of length leaves nothing, or not all, before a model is loaded.

The rules are TRL's: what each trainer counts as one sequence, and which rows it drops. Only rows that may be longer
than the limit are split into tokens: a token stands for one byte at least.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from executors.base import ExecutorError, bad_input

Row = Mapping[str, Any]
#: Lengths of a row in tokens: of what comes before the first token that counts for the loss, and of the whole.
Lengths = tuple[int, int]
#: Is told how many rows are done.
Tell = Callable[[int], None]
#: Most rows that are split into tokens at once, and the characters from which on a batch takes no further row.
_BATCH_ROWS: Final = 512
_BATCH_CHARACTERS: Final = 4_000_000
#: After so many rows at most something is told.
_LOOKED_AT: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How many of `rows` are `lost`, because nothing to learn from is left of them, and how many are `cut`."""

    rows: int
    lost: int = 0
    cut: int = 0
    why: str = "have no completion left within"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One sequence of a row, as text: the `whole`, and what comes `before` the first token that counts for the loss.

    `is_text`: it was no chat, so the tokenizer and the trainer put their tokens around it.
    """

    before: str
    whole: str
    is_text: bool


class Meter:
    """Counts tokens of texts and chats as TRL's trainers do, with the tokenizer of the model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def piece(self, prompt: Any, whole: Any, tools: Any, limit: int) -> Piece | None:
        """Return a sequence of a row; None where even one token a byte would not reach the limit."""
        text = self._text(whole, tools)
        if len(text.encode("utf-8", "replace")) + 2 < limit:  # an end and a begin
            return None
        before = self._text(prompt, tools, asks=True) if prompt else ""
        return Piece(before=before, whole=text, is_text=isinstance(whole, str))

    def _text(self, value: Any, tools: Any, *, asks: bool = False) -> str:
        """Return a chat as its template writes it; `asks` ends it where an answer begins. A text stays as it is."""
        if isinstance(value, str):
            return value
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return str(self._tokenizer.apply_chat_template(value, tools=tools, tokenize=False, add_generation_prompt=asks))

    def _tokens(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Return the tokens of texts; `special` adds those that the tokenizer puts around every text."""
        return list(self._tokenizer(texts, add_special_tokens=special)["input_ids"]) if texts else []

    def lengths(self, pieces: Sequence[Piece]) -> list[Lengths]:
        """Return the lengths of sequences, all of them split into tokens at once."""
        found: dict[int, Lengths] = {}
        for is_text in (True, False):
            numbers = [number for number, piece in enumerate(pieces) if piece.is_text is is_text]
            wholes = self._tokens([pieces[number].whole for number in numbers], special=is_text)
            befores = iter(self._tokens([text for n in numbers if (text := pieces[n].before)], special=is_text))
            end = 1 if is_text else 0  # the trainers put an end after texts, the template after chats
            for number, whole in zip(numbers, wholes, strict=True):
                before = next(befores) if pieces[number].before else []
                common = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), None)
                found[number] = min(len(before), len(whole)) if common is None else common, len(whole) + end
        return [found[number] for number in range(len(pieces))]


def supervised(rows: Sequence[Row], tokenizer: Any, arguments: Any, tell: Tell) -> Fit:
    """Return how rows as SFTTrainer takes them fit into `arguments.max_length`."""
    if getattr(arguments, "packing", False):
        return Fit(rows=len(rows))
    meter = Meter(tokenizer)
    completion_only = arguments.completion_only_loss is not False

    def pieces(row: Row, limit: int) -> list[Piece | None]:
        if "prompt" not in row:
            whole = row.get("messages", row.get("text"))
            return [meter.piece("", whole, row.get("tools"), limit)]
        prompt = row["prompt"] if completion_only else ""
        return [meter.piece(prompt, row["prompt"] + row["completion"], row.get("tools"), limit)]

    def keeps(before: int, whole: int, limit: int) -> bool:
        return before < min(whole, limit)

    return _fit(rows, arguments.max_length, meter, pieces, keeps, tell)


def preferences(rows: Sequence[Row], tokenizer: Any, arguments: Any, tell: Tell) -> Fit:
    """Return how rows as DPOTrainer takes them fit: one whose prompt fills the limit is dropped, answers are cut."""
    from trl.data_utils import extract_prompt

    meter = Meter(tokenizer)

    def pieces(row: Row, limit: int) -> list[Piece | None]:
        row = row if "prompt" in row else extract_prompt(dict(row))
        return [
            meter.piece(row["prompt"], row["prompt"] + row[answer], row.get("tools"), limit)
            for answer in ("chosen", "rejected")
        ]

    def keeps(before: int, whole: int, limit: int) -> bool:
        return before < limit

    return _fit(rows, arguments.max_length, meter, pieces, keeps, tell)


def scored(rows: Sequence[Row], tokenizer: Any, arguments: Any, tell: Tell) -> Fit:
    """Return how rows as RewardTrainer takes them fit: one with an answer that is longer than the limit is dropped."""
    meter = Meter(tokenizer)

    def pieces(row: Row, limit: int) -> list[Piece | None]:
        begin = row.get("prompt", row["chosen"][:0])
        return [meter.piece("", begin + row[answer], row.get("tools"), limit) for answer in ("chosen", "rejected")]

    def keeps(before: int, whole: int, limit: int) -> bool:
        return whole <= limit

    found = _fit(rows, arguments.max_length, meter, pieces, keeps, tell)
    return replace(found, why="have an answer that is longer than")


def _fit(
    rows: Sequence[Row],
    limit: int | None,
    meter: Meter,
    pieces: Callable[[Row, int], list[Piece | None]],
    keeps: Callable[[int, int, int], bool],
    tell: Tell,
) -> Fit:
    if limit is None:
        return Fit(rows=len(rows))
    lost = cut = 0
    for batch in _batches(rows, limit, pieces):
        for before, whole in _measured(batch, meter):
            kept = keeps(before, whole, limit)
            lost += not kept
            cut += kept and whole > limit
        tell(batch.end)
    return Fit(rows=len(rows), lost=lost, cut=cut)


@dataclass(kw_only=True)
class _Batch:
    """Rows whose sequences are split into tokens together: index of the row and its pieces. `end`: rows through it."""

    rows: list[tuple[int, list[Piece]]] = field(default_factory=list)
    characters: int = 0
    end: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= _BATCH_ROWS or self.characters >= _BATCH_CHARACTERS


def _batches(rows: Sequence[Row], limit: int, pieces: Callable[[Row, int], list[Piece | None]]) -> Iterator[_Batch]:
    batch = _Batch()
    for index, row in enumerate(rows):
        try:
            long = [piece for piece in pieces(row, limit) if piece]
        except Exception as error:  # a template is a program of the model's author
            raise _unwritable(index, error) from error
        batch.end = index + 1
        if long:
            batch.rows.append((index, long))
            batch.characters += sum(len(piece.before) + len(piece.whole) for piece in long)
        if batch.is_full or batch.end % _LOOKED_AT == 0:
            yield batch
            batch = _Batch()
    batch.end = len(rows)
    yield batch


def _measured(batch: _Batch, meter: Meter) -> Iterator[Lengths]:
    """Yield the lengths of each row: the least before what counts, the most in all."""
    try:
        found = iter(meter.lengths([piece for _, pieces in batch.rows for piece in pieces]))
    except Exception:
        for index, pieces in batch.rows:  # one by one: which row was it?
            try:
                meter.lengths(pieces)
            except Exception as error:
                raise _unwritable(index, error) from error
        raise
    for _, pieces in batch.rows:
        both = [next(found) for _ in pieces]
        yield min(before for before, _ in both), max(whole for _, whole in both)


def _unwritable(index: int, error: Exception) -> ExecutorError:
    return bad_input(f"data row {index}: the chat template cannot write it: {str(error)[:300]}")


def check_fit(fit: Fit, limit: Any, side: str) -> str | None:
    """Return what to say of rows that are lost, None for none. Raises ExecutorError: BadInput where all are."""
    if not fit.lost:
        return None
    said = f"{fit.lost} of {fit.rows} rows {fit.why} training.max_length {limit}"
    if fit.lost == fit.rows:
        raise bad_input(f"data ({side}): {said}; raise it, or give shorter rows")
    return said
