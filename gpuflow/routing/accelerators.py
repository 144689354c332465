"""The shorthand `accelerators:` of a template, and how a requirement is written in it.

    spec    = "cpu" | token *(":" token)          tokens in any order, each kind at most once
    token   = name | memory | count
    name    = letters first, globs allowed: A100, H100*, RTX4090, any; several joined by "|"; memory may
              stand in it: A100-80GB, NVIDIA A100 80GB PCIe
    memory  = 40GB | 40GB+ (the same: at least) | 24GB..80GB | 24GB.. | ..80GB    on the box of each GPU
    count   = 2 | 1..4

A list, or a mapping of name to count, holds ordered alternatives. Used by `gpuflow.routing.resources` and
the app.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.routing.names import normalise_name
from gpuflow.routing.requirement import Requirement, is_gpu_name
from gpuflow.routing.units import gpu_memory_gb

_COUNT: Final = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_NAME: Final = re.compile(r"[A-Za-z*?][A-Za-z0-9*?|_. -]*")
_WORD: Final = re.compile(r"[^\s_-]+")
_OTHER_VENDORS: Final = frozenset({"amd", "google", "intel", "tenstorrent", "tpu"})


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A piece of the shorthand: what kind of ask it is, its text, and its column (from 1)."""

    kind: str
    text: str
    column: int

    def __str__(self) -> str:
        return f"{self.text!r} at column {self.column}"


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """A range of memory on the box, in GB."""

    minimum: float | None
    maximum: float | None = None


def parse_accelerators(value: object) -> tuple[Requirement, ...]:
    """Read the shorthand into requirements, in order of preference. Raises InvalidTemplate at a token."""
    if isinstance(value, Mapping):
        specs = [f"{name}:{count}" for name, count in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        specs = [_as_text(item) for item in value]
    else:
        specs = [_as_text(value)]
    if not specs:
        raise InvalidTemplate("accelerators is an empty list; leave it out, or name a GPU such as A100:1")
    parsed = [_parse(spec) for spec in specs]
    for number, requirement in enumerate(parsed):
        if requirement in parsed[:number]:
            first = specs[parsed.index(requirement)]
            raise InvalidTemplate(f"accelerators: {specs[number]!r} repeats {first!r}; keep one")
    return tuple(parsed)


def format_accelerators(requirement: Requirement) -> str:
    """Write the GPU part of a requirement as shorthand; parsing it gives that part back."""
    ask = requirement
    if not ask.gpu_count:
        return "cpu"
    tokens = ["|".join(ask.gpu_names)] if ask.gpu_names else []
    low, high = ask.vram_gb_min, ask.vram_gb_max
    if high is not None:
        tokens.append(f"{_show(low) if low else ''}..{_show(high)}")
    elif low is not None:
        tokens.append(_show(low) + "+")
    top = "" if ask.gpu_count_max is None else f"..{ask.gpu_count_max}"
    return ":".join([*tokens, f"{ask.gpu_count}{top}"])


def _as_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidTemplate(f"accelerators: {value!r} is not text such as A100:1")
    return str(value)


def _parse(spec: str) -> Requirement:
    if spec.strip().lower() == "cpu":
        return Requirement()
    names: tuple[str, ...] = ()
    memory = _Memory(minimum=None)
    low, high = 1, None
    seen: dict[str, _Token] = {}
    for token in _tokens(spec):
        first = seen.setdefault(token.kind, token)
        if first is not token:
            raise InvalidTemplate(
                f"accelerators {spec!r}: {token} gives a second {token.kind}, after {first}; keep one "
                "(alternatives are a list)"
            )
        if token.kind == "name":
            names = _names(spec, token)
        elif token.kind == "memory":
            memory = _memory(token.text) or memory
        else:
            found = _COUNT.fullmatch(token.text)
            low, high = (int(found[1]), int(found[2]) if found[2] else None) if found else (1, None)
            if low == 0:
                raise InvalidTemplate(f"accelerators {spec!r}: {token} asks for no GPU; write cpu")
    try:
        return Requirement(
            gpu_count=low,
            gpu_count_max=high,
            gpu_names=names,
            vram_gb_min=memory.minimum,
            vram_gb_max=memory.maximum,
        )
    except InvalidTemplate:
        raise
    except GPUFlowError as error:
        raise InvalidTemplate(f"accelerators {spec!r}: {error}") from error


def _names(spec: str, token: _Token) -> tuple[str, ...]:
    """Return the normalised names of a name token; none when one of them means any GPU."""
    parts = token.text.split("|")
    names = tuple(normalise_name(part) for part in parts)
    for part, name in zip(parts, names, strict=True):
        if not part.strip() or (name and not is_gpu_name(name)):
            raise InvalidTemplate(f"accelerators {spec!r}: {token} is not the name of a GPU")
    return () if "" in names else names


def _tokens(spec: str) -> Iterator[_Token]:
    """Yield the tokens; a name with memory in it gives both."""
    if not spec.strip():
        raise InvalidTemplate("accelerators is empty; leave it out, or name a GPU such as A100:1")
    column = 1
    for piece in spec.split(":"):
        text = piece.strip()
        start = column + len(piece) - len(piece.lstrip())
        column += len(piece) + 1
        if _COUNT.fullmatch(text):
            yield _Token(kind="count", text=text, column=start)
        elif _memory(text) is not None:
            yield _Token(kind="memory", text=text, column=start)
        elif _NAME.fullmatch(text.replace("+", "")):
            yield from _name_tokens(spec, text, start)
        else:
            what = "an empty token" if not text else f"{text!r}"
            raise InvalidTemplate(
                f"accelerators {spec!r}: {what} at column {start} is neither a name (A100), "
                "nor memory (40GB, 24GB..80GB), nor a count (2, 1..4)"
            )


def _name_tokens(spec: str, text: str, start: int) -> Iterator[_Token]:
    """Split "A100-80GB" into its name and its memory; "nvidia" alone is the vendor and asks nothing."""
    words: list[str] = []
    for found in _WORD.finditer(text):
        if _memory(found[0]) is not None:
            yield _Token(kind="memory", text=found[0], column=start + found.start())
        elif "+" in found[0]:
            raise InvalidTemplate(
                f"accelerators {spec!r}: {found[0]!r} at column {start + found.start()}: "
                "'+' belongs to memory, such as 40GB+; a glob is written A100*"
            )
        else:
            words.append(found[0])
    name = "-".join(words)
    if name.lower() in _OTHER_VENDORS:
        raise InvalidTemplate(f"accelerators {spec!r}: {name!r} at column {start}: only NVIDIA GPUs are supported")
    if name and name.lower() != "nvidia":
        yield _Token(kind="name", text=name, column=start)


def _memory(text: str) -> _Memory | None:
    """Read a memory token; None when it is none. The unit may stand at the end of a range only: 24..80GB."""
    low, dots, high = text.partition("..")
    if not dots:
        amount = gpu_memory_gb(text.removesuffix("+"))
        return None if amount is None else _Memory(minimum=amount)
    if low and high and low.replace(".", "", 1).isdecimal():
        low += high.lstrip("0123456789. ")
    bounds = [gpu_memory_gb(part) if part.strip() else None for part in (low, high)]
    if (low.strip() and bounds[0] is None) or (high.strip() and bounds[1] is None) or bounds == [None, None]:
        return None
    return _Memory(minimum=bounds[0], maximum=bounds[1])


def _show(gigabytes: float) -> str:
    whole = gigabytes == int(gigabytes)
    return f"{gigabytes:.0f}GB" if whole else f"{gigabytes * 1024:.0f}MB"
