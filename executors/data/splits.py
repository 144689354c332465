"""Splits rows into training and evaluation, the same way for the same seed. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from executors.base import bad_input


def split(rows: Sequence[dict[str, Any]], share: float, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and evaluation rows; about `share` of them (at least one) are for evaluation.

    Equal rows stay on one side, so that the evaluation never sees a row of the training. The order of rows is kept.
    Raises ExecutorError: BadInput when nothing is left to train on.
    """
    if share <= 0:
        return list(rows), []
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(json.dumps(row, sort_keys=True), []).append(index)
    wanted = max(1, round(len(rows) * share))
    order = list(groups.values())
    random.Random(seed).shuffle(order)  # noqa: S311
    chosen: set[int] = set()
    for group in order[:-1]:
        if len(chosen) >= wanted:
            break
        if len(chosen) + len(group) <= wanted or not chosen:
            chosen.update(group)
    if not chosen:
        raise bad_input(f"data.eval_split {share} leaves nothing to train on: there are {len(groups)} different rows")
    return (
        [row for index, row in enumerate(rows) if index not in chosen],
        [row for index, row in enumerate(rows) if index in chosen],
    )
