"""Counts the rows of a training: read, trained on, evaluated on, and left out, with the reason. Pure.

A row without anything to learn from is left out before a model is loaded, and rows of which the limit of length leaves
nothing are counted then (`executors.training.lengths`); a training that has no row left is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.base import bad_input

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """`read` = `trained` + `evaluated` + `empty` + `too_long`; `truncated` rows are trained on, but not whole."""

    read: int
    trained: int
    evaluated: int
    empty: int = 0
    too_long: int = 0
    truncated: int = 0

    def record(self) -> dict[str, Any]:
        """Return the fields of the result."""
        dropped = {"empty": self.empty, "max_length": self.too_long}
        return {
            "rows": self.read,
            "rows_trained": self.trained,
            "rows_evaluated": self.evaluated,
            "rows_dropped": {reason: number for reason, number in dropped.items() if number},
            "rows_truncated": self.truncated,
        }


def without_empty(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows from which something can be learned, in their order.

    An empty text, an empty completion and a chat of empty messages teach a model to say nothing. Raises ExecutorError:
    BadInput where no row is left.
    """
    kept = [dict(row) for row in rows if not is_empty(row)]
    if rows and not kept:
        raise bad_input(
            f"data: all {len(rows)} rows are empty (no text, no completion); check data.columns and the data itself"
        )
    return kept


def is_empty(row: Row) -> bool:
    """Say whether a row with roles (`executors.data.columns`) holds nothing to learn from."""
    for role in ("text", "completion", "messages"):
        if role in row:
            return _is_blank(row[role])
    return False


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return all(not message.get("content", "").strip() and not message.get("tool_calls") for message in value)
