"""Cuts a text into overlapping passages, and markdown into sections first. Pure.

A passage begins and ends between words. It prefers to end with a paragraph, else with a sentence or a line, where one
ends in its last third.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from executors.base import bad_input

Unit = Literal["tokens", "characters"]
#: Returns the number of tokens of each word.
CountTokens = Callable[[Sequence[str]], Sequence[int]]

#: Size of a passage where the task does not say. 200 tokens fit the models of this kind that take the fewest (256).
DEFAULT_SIZES: Final[Mapping[Unit, int]] = {"tokens": 200, "characters": 1000}
#: Tokens that a model adds to a text, at most some of these.
_MARKS: Final = 8
#: Words that are counted by the tokenizer at once.
_WORDS_AT_ONCE: Final = 4096
#: A longer word is parted before it is counted: to some tokenizers it would be one unknown token.
_WORD: Final = re.compile(r"\S{1,256}")
#: So many characters of blank between two words count as a token, so that no passage is long for its blanks.
_BLANKS_A_TOKEN: Final = 64
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE: Final = re.compile(r" {0,3}(```+|~~~+)")
#: Longest heading that is kept, in characters.
_MAX_HEADING: Final = 200


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How long passages are and how much of each the next one repeats, in `unit`."""

    unit: Unit = "tokens"
    size: int = DEFAULT_SIZES["tokens"]
    overlap: int = 32


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a text, `text[start:end]`, and the headings above it, outermost first."""

    headings: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A word, or a part of a long one: its place in the text, and where it begins and ends in the unit."""

    start: int
    end: int
    begins: int
    ends: int


def read_chunking(given: Mapping[str, Any] | None, max_tokens: int | None = None) -> Chunking:
    """Return the chunking of a `chunks` section, for a model that reads `max_tokens` of a text.

    Raises ExecutorError: BadInput for sizes that contradict, or that the model cannot read.
    """
    given = given or {}
    unit: Unit = given.get("unit") or "tokens"
    limit = max_tokens if unit == "tokens" else None
    default = DEFAULT_SIZES[unit] if limit is None else max(1, min(DEFAULT_SIZES[unit], limit - _MARKS))
    size = int(given.get("size") or default)
    if limit is not None and size > limit:
        raise bad_input(f"chunks.size is {size} tokens, and the model reads {limit} of a text; give at most {limit}")
    overlap = given.get("overlap")
    overlap = size // 6 if overlap is None else int(overlap)
    if overlap > size // 2:
        raise bad_input(f"chunks.overlap is {overlap}; it must be at most half of chunks.size ({size})")
    return Chunking(unit=unit, size=size, overlap=overlap)


def markdown_sections(text: str) -> Iterator[Section]:
    """Yield the sections of a markdown text, each from its heading to the next one; fenced code holds no headings.

    A heading with nothing but deeper headings below it is no section: it stands in the headings of those.
    """
    headings: list[tuple[int, str]] = []
    start, body, position, fence = 0, 0, 0, ""
    for match in _LINE.finditer(text):
        line = match[0]
        bare = line.rstrip()
        mark = _FENCE.match(bare)
        if mark and (not fence or (mark[1].startswith(fence) and bare.strip() == mark[1])):
            fence = "" if fence else mark[1]
        found = None if fence or mark else _heading(bare)
        if found:
            level, name = found
            is_parent = start < body and not text[body:position].strip() and headings and headings[-1][0] < level
            if text[start:position].strip() and not is_parent:
                yield Section(headings=tuple(name for _, name in headings), start=start, end=position)
            headings = [one for one in headings if one[0] < level]
            if name:
                headings.append((level, name[:_MAX_HEADING]))
            start, body = position, position + len(line)
        position += len(line)
    if text[start:].strip():
        yield Section(headings=tuple(name for _, name in headings), start=start, end=len(text))


def _heading(line: str) -> tuple[int, str] | None:
    """Return level and text of a line that is a heading: `## Text ##`. No pattern, which a hostile line could slow."""
    name = line.lstrip("#")
    level = len(line) - len(name)
    if not 1 <= level <= 6 or (name and name[0] not in " \t"):
        return None
    name = name.strip()
    bare = name.rstrip("#")
    return level, bare.rstrip() if not bare or bare[-1] in " \t" else name


def passages_of(text: str, chunking: Chunking, count_tokens: CountTokens) -> Iterator[tuple[int, int]]:
    """Yield the passages of a text as (start, end), in order. Every word is in one of them."""
    pieces = _pieces(text, chunking, count_tokens)
    window: list[_Piece] = []  # of this passage, and one beyond it
    is_end, done = False, 0  # where the passage before this one ends
    while True:
        while not is_end and (len(window) < 2 or window[-1].ends - window[0].begins <= chunking.size):
            piece = next(pieces, None)
            if piece is None:
                is_end = True
            else:
                window.append(piece)
        if not window:
            return
        last = _last_fitting(window, chunking.size)
        if last < len(window) - 1:
            last = _good_end(text, window, last, chunking.size, done)
        done = window[last].end
        yield window[0].start, done
        if is_end and last == len(window) - 1:
            return
        following = last + 1
        while following > 1 and window[last].ends - window[following - 1].begins <= chunking.overlap:
            if window[last + 1].ends - window[following - 1].begins > chunking.size:
                break  # what is repeated would fill the next passage, which has to hold a new word
            following -= 1
        window = window[following:]


def _pieces(text: str, chunking: Chunking, count_tokens: CountTokens) -> Iterator[_Piece]:
    tokens_so_far, before = 0, 0
    for words in _batches(text):
        weights = count_tokens([text[start:end] for start, end in words]) if chunking.unit == "tokens" else ()
        for number, (start, end) in enumerate(words):
            weight = weights[number] if weights else end - start
            tokens_so_far += (start - before) // _BLANKS_A_TOKEN
            before = end
            for place, until, parts in _split(start, end, weight, chunking.size):
                begins = tokens_so_far if weights else place
                ends = begins + parts
                tokens_so_far = ends
                yield _Piece(start=place, end=until, begins=begins, ends=ends)


def _batches(text: str) -> Iterator[list[tuple[int, int]]]:
    batch: list[tuple[int, int]] = []
    for found in _WORD.finditer(text):
        batch.append(found.span())
        if len(batch) == _WORDS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _split(start: int, end: int, weight: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, weight) of the parts of a word: itself, unless it would fill more than half a passage.

    Scripts without spaces have such words; their tokens are about equally long, so they are parted by characters.
    """
    length = end - start
    if weight <= max(1, size // 2) or length == 1:
        yield start, end, weight
        return
    count = min(length, -(-weight // max(1, size // 8)))
    cuts = [start + length * number // count for number in range(count + 1)]
    shares = [weight * number // count for number in range(count + 1)]
    for number in range(count):
        yield cuts[number], cuts[number + 1], shares[number + 1] - shares[number]


def _last_fitting(window: Sequence[_Piece], size: int) -> int:
    last = 0
    while last + 1 < len(window) and window[last + 1].ends - window[0].begins <= size:
        last += 1
    return last


def _good_end(text: str, window: Sequence[_Piece], last: int, size: int, done: int) -> int:
    """Return the best end from `last` back to two thirds of the size: a paragraph's, else a sentence's or a line's.

    It lies beyond `done`, the end of the passage before.
    """
    fallback: int | None = None
    for at in range(last, 0, -1):
        if window[at].ends - window[0].begins < size * 2 // 3 or window[at].end <= done:
            break
        gap = text[window[at].end : window[at + 1].start]
        if gap.count("\n") > 1:
            return at
        if fallback is None and gap and ("\n" in gap or text[window[at].end - 1] in ".!?:;"):
            fallback = at
    return last if fallback is None else fallback
