"""Makes prompts from a graph template whose values are known: `data: {type: graph_template, template: {columns}}`.

Used by `checking` at dispatch, so that executors see plain lists only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def render(template: Mapping[str, Any]) -> list[str]:
    """Return the prompts, one a row.

    A column whose value is a list gives one entry a row (an entry's `output`, where it has one); any other value stands
    in every row. Columns that are lists must be equally long. `options.intro` and `options.closing` (a line or a list
    of lines) go before and after. Raises ValueError with the cause.
    """
    columns = [(str(column["label"]), _values(column)) for column in template["columns"]]
    lengths = {label: len(values) for label, values in columns if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label!r} has {length}" for label, length in lengths.items())
        raise ValueError(f"columns that are lists must be equally long, but {listed}")
    options = template.get("options") or {}
    if not isinstance(options, Mapping):
        raise ValueError("options must be a mapping with intro and closing")
    intro, closing = _lines(options.get("intro")), _lines(options.get("closing"))
    rows = next(iter(lengths.values()), 1)
    return [
        "\n\n".join(
            part
            for part in (
                intro,
                *(f"{label}:\n{_text(v[row] if isinstance(v, list) else v)}" for label, v in columns),
                closing,
            )
            if part
        )
        for row in range(rows)
    ]


def _values(column: Mapping[str, Any]) -> Any:
    value = column.get("value")
    if value is None and isinstance(column.get("data"), Mapping):
        value = column["data"].get("items")
    if value is None:
        raise ValueError(f"column {column['label']!r} has no value; give value, node and path, or expr")
    return value


def _text(value: Any) -> str:
    if isinstance(value, Mapping) and "output" in value:
        value = value["output"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lines(value: Any) -> str:
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value or "")
