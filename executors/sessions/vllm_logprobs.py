"""vLLM's log probabilities as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Told = dict[str, Any]


def generated(tokens: Sequence[int], positions: Iterable[Mapping[int, Any] | None]) -> list[Told]:
    """Return for each generated token its log probability and those of the likeliest ones."""
    return [
        {**_one(token, found[token]), "top": _all(found)} if found and token in found else {"id": token, "top": []}
        for token, found in zip(tokens, positions, strict=False)
    ]


def of_prompt(positions: Iterable[Mapping[int, Any] | None]) -> list[list[Told] | None]:
    """Return for each token of the prompt the log probabilities at its place; the first has none."""
    return [None if found is None else _all(found) for found in positions]


def _all(found: Mapping[int, Any]) -> list[Told]:
    return [_one(token, entry) for token, entry in sorted(found.items(), key=lambda pair: -pair[1].logprob)]


def _one(token: int, entry: Any) -> Told:
    return {"id": token, "token": entry.decoded_token, "logprob": entry.logprob}
