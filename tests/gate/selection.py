"""Which test files a run needs to import, by the expression of its `-m`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def required(expression: str) -> list[str]:
    """Return the markers that each test of a run has, as far as an expression of `-m` says so plainly."""
    terms = [term.strip() for term in re.split(r"\band\b", expression)]
    plain = all(re.fullmatch(r"(?:not\s+)?\w+", term) for term in terms)
    return [term for term in terms if term.isidentifier()] if plain else []


def may_have(text: str, names: Sequence[str]) -> bool:
    """Whether a file with this text can have a test with all of these markers. Test files alone give them to tests."""
    return all(re.search(rf"\bmark\.{name}\b", text) for name in names)
