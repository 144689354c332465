"""The shorthand `accelerators:` of a template, and how a requirement is written in it.

    spec    = "cpu" | token *(":" token)          tokens in any order, each kind at most once
    token   = name | memory | count
    name    = letters first, globs allowed: A100, H100*, RTX4090, any; several joined by "|"; memory may
              stand in it: A100-80GB, NVIDIA A100 80GB PCIe
    memory  = 40GB | 40GB+ (the same: at least) | 24GB..80GB | 24GB.. | ..80GB    on the box of each GPU
    count   = 2 | 1..4 | 0.5                      0.5: a share of one GPU

A list holds ordered alternatives; a mapping of name to count is one for each name, and may stand in a list.
A name that begins with the vendor's, as nvidia-smi prints it, means the model: `NVIDIA A100 80GB PCIe` asks
for an A100 with 80 GB, `A100-PCIe` for that form of it. Used by `gpuflow.routing.resources` and the app.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.routing.gpu_names import normalise_name
from gpuflow.routing.requirement import Requirement, is_gpu_name
from gpuflow.routing.units import MemoryRange, gpu_memory_range

_COUNT: Final = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_SHARE: Final = re.compile(r"0?\.[0-9]{1,6}")
_NAME: Final = re.compile(r"[A-Za-z*?][A-Za-z0-9*?|_. -]*")
_WORD: Final = re.compile(r"[^\s_-]+")
#: The most names, and the most alternatives, that one template may give: each is compared with each.
MOST_ALTERNATIVES: Final = 64
_VENDORS: Final = frozenset({"nvidia", "tesla"})
#: How a model is built in: part of the names that nvidia-smi prints, not of what people ask for.
_FORM: Final = re.compile(r"pcie|sxm\d?|hbm\d?e?", re.IGNORECASE)
_OTHER_VENDORS: Final = frozenset({"amd", "google", "intel", "tenstorrent", "tpu"})


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A piece of the shorthand: what kind of ask it is, its text, and its column (from 1)."""

    kind: str
    text: str
    column: int

    def __str__(self) -> str:
        return f"{self.text!r} at column {self.column}"


def parse_accelerators(value: object) -> tuple[Requirement, ...]:
    """Read the shorthand into requirements, in order of preference. Raises InvalidTemplate at a token."""
    given = list(value) if isinstance(value, list | tuple) else [value]
    specs = [spec for item in given for spec in _specs(item)]
    if not specs:
        raise InvalidTemplate("accelerators is an empty list; leave it out, or name a GPU such as A100:1")
    refuse_many(len(specs), "accelerators")
    parsed = [_parse(spec) for spec in specs]
    refuse_many(sum(len(ask.gpu_names) for ask in parsed), "accelerators")
    for number, requirement in enumerate(parsed):
        if requirement in parsed[:number]:
            first = specs[parsed.index(requirement)]
            raise InvalidTemplate(f"accelerators: {specs[number]!r} repeats {first!r}; keep one")
    return tuple(parsed)


def refuse_many(names: int, field: str) -> None:
    """Raise InvalidTemplate where a field names more GPUs than there are kinds."""
    if names > MOST_ALTERNATIVES:
        raise InvalidTemplate(f"{field} names {names} GPUs; name at most {MOST_ALTERNATIVES}, or use a glob such as A*")


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
    count = f"{ask.gpu_count}{top}" if ask.gpu_share is None else f"{ask.gpu_share:.3f}"
    return ":".join([*tokens, count])


def _specs(value: object) -> list[str]:
    """Return the specs of one entry: a mapping has one for each name."""
    if isinstance(value, Mapping):
        return [f"{_as_text(name)}:{_as_text(count)}" for name, count in value.items()]
    return [_as_text(value)]


def _as_text(value: object) -> str:
    odd = isinstance(value, float) and not math.isfinite(value)
    if odd or isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidTemplate(f"accelerators: {value!r} is not text such as A100:1")
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _parse(spec: str) -> Requirement:
    if spec.strip().lower() == "cpu":
        return Requirement()
    fields: dict[str, Any] = {"gpu_count": 1}
    seen: dict[str, _Token] = {}
    for token in _tokens(spec):
        first = seen.setdefault(token.kind, token)
        if first is not token:
            raise InvalidTemplate(
                f"accelerators {spec!r}: {token} gives a second {token.kind}, after {first}; keep one "
                "(alternatives are a list)"
            )
        fields.update(_fields(spec, token))
        try:
            Requirement(**fields)
        except InvalidTemplate:
            raise
        except GPUFlowError as error:
            raise InvalidTemplate(f"accelerators {spec!r}: {token}: {error}") from error
    return Requirement(**fields)


def _fields(spec: str, token: _Token) -> dict[str, Any]:
    """Return the fields of a requirement that a token gives."""
    if token.kind == "name":
        return {"gpu_names": _names(spec, token)}
    if token.kind == "memory":
        memory = gpu_memory_range(token.text) or MemoryRange(minimum=None)
        return {"vram_gb_min": memory.minimum, "vram_gb_max": memory.maximum}
    if _SHARE.fullmatch(token.text):
        return {"gpu_share": _share(spec, token)}
    low, high = count_range(token.text) or (1, None)
    if low == 0:
        raise InvalidTemplate(f"accelerators {spec!r}: {token} asks for no GPU; write cpu")
    return {"gpu_count": low, "gpu_count_max": high}


def _share(spec: str, token: _Token) -> float:
    share = float(token.text)
    if not share:
        raise InvalidTemplate(f"accelerators {spec!r}: {token} asks for no GPU; write cpu")
    return share


def _names(spec: str, token: _Token) -> tuple[str, ...]:
    """Return the normalised names of a name token; none when one of them means any GPU."""
    names = []
    column = token.column
    parts = token.text.split("|")
    refuse_many(len(parts), "an alternative of accelerators")
    for part in parts:
        name = normalise_name(part)
        if not part.strip() or (name and not is_gpu_name(name)):
            what = repr(part.strip()) if part.strip() else "an empty name"
            raise InvalidTemplate(f"accelerators {spec!r}: {what} at column {column} is not the name of a GPU")
        names.append(name)
        column += len(part) + 1
    return () if "" in names else tuple(names)


def count_range(text: str) -> tuple[int, int | None] | None:
    """Return the bounds of a count ("2", "1..4"), the upper one None where there is none, or None."""
    found = _COUNT.fullmatch(text.strip())
    return None if found is None else (int(found[1]), int(found[2]) if found[2] else None)


def _tokens(spec: str) -> Iterator[_Token]:
    """Yield the tokens; a name with memory in it gives both."""
    if not spec.strip():
        raise InvalidTemplate(f"accelerators {spec!r} is empty at column 1; leave it out, or name a GPU such as A100:1")
    column = 1
    for piece in spec.split(":"):
        text = piece.strip()
        start = column + len(piece) - len(piece.lstrip())
        column += len(piece) + 1
        if _COUNT.fullmatch(text) or _SHARE.fullmatch(text):
            yield _Token(kind="count", text=text, column=start)
        elif gpu_memory_range(text) is not None:
            yield _Token(kind="memory", text=text, column=start)
        elif _NAME.fullmatch(text.replace("+", "")):
            yield from _name_tokens(spec, text, start)
        else:
            what = "an empty token" if not text else f"{text!r}"
            raise InvalidTemplate(
                f"accelerators {spec!r}: {what} at column {start} is neither a name (A100), "
                "nor memory (40GB, 24GB..80GB), nor a count (2, 1..4, 0.5)"
            )


def _name_tokens(spec: str, text: str, start: int) -> Iterator[_Token]:
    """Split "A100-80GB" into its name and its memory; "nvidia" alone is the vendor and asks nothing."""
    words: list[re.Match[str]] = []
    for found in _WORD.finditer(text):
        if gpu_memory_range(found[0]) is not None:
            yield _Token(kind="memory", text=found[0], column=start + found.start())
        elif "+" in found[0]:
            raise InvalidTemplate(
                f"accelerators {spec!r}: {found[0]!r} at column {start + found.start()}: "
                "'+' belongs to memory, such as 40GB+; a glob is written A100*"
            )
        else:
            words.append(found)
    if len(words) > 1 and words[0][0].lower() in _VENDORS:
        words = [words[0], *(word for word in words[1:] if not _FORM.fullmatch(word[0]))]
    name = "-".join(word[0] for word in words)
    if name.lower() in _OTHER_VENDORS:
        raise InvalidTemplate(f"accelerators {spec!r}: {name!r} at column {start}: only NVIDIA GPUs are supported")
    if name and name.lower() != "nvidia":
        yield _Token(kind="name", text=name, column=start + words[0].start())


def _show(gigabytes: float) -> str:
    whole = gigabytes == int(gigabytes)
    return f"{gigabytes:.0f}GB" if whole else f"{gigabytes * 1024:.0f}MB"
