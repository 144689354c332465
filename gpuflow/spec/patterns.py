"""Regular expressions that users give to find numbers in text. The standard library alone: a child reads them, too."""

from __future__ import annotations

import re


def metric_pattern(text: str) -> re.Pattern[str]:
    """Return the compiled pattern of a metric. Raises ValueError for one that is none, or has no group."""
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text[:200]!r} is no regular expression: {error}") from None
    if pattern.groups < 1:
        raise ValueError(f"{text[:200]!r} has no group; put the number in brackets, as in 'loss=([0-9.]+)'")
    return pattern
