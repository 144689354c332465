"""From the entries of `data` to texts that are embedded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from executors.base import bad_input
from gpuflow.spec.row_forms import TEXTS

#: Columns that hold the text of a record, the first that is there.
TEXT_COLUMNS: Final = TEXTS


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text: the entry as given, and what is embedded."""

    index: int
    given: Any
    text: str


def read_texts(entries: Sequence[Any], data: Mapping[str, Any], prefix: str = "") -> list[Text]:
    """Return the text of every entry, `prefix` before it. Raises ExecutorError: BadInput naming the entry."""
    if not entries:
        raise bad_input("the task has no texts; give data.items or a data file with rows")
    column = (data.get("columns") or {}).get("text") or data.get("column")
    return [
        Text(index=index, given=entry, text=prefix + _text(entry, index, column)) for index, entry in enumerate(entries)
    ]


def _text(entry: Any, index: int, column: str | None) -> str:
    value = entry
    if isinstance(entry, Mapping):
        name = next((name for name in ([column] if column else TEXT_COLUMNS) if entry.get(name) is not None), None)
        if name is None:
            found = ", ".join(map(str, entry)) or "none"
            raise bad_input(f"data item {index} has no {column or 'text'}; its columns are: {found}")
        value = entry[name]
    if not isinstance(value, str) or not value:
        raise bad_input(f"data item {index} is {type(value).__name__}; what is embedded is text")
    return value
