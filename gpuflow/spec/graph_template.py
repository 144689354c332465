"""Makes prompts from a graph template whose values are known: `data: {type: graph_template, template: {columns}}`.

Used by `checking` at dispatch, so that executors see plain lists only. `columns` (no name) writes one block a column;
`two_column_briefing`, `format` and `text` are FlowMesh's. Nothing of a template is run: `{name}` is replaced, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from gpuflow.spec.format_template import check_format, render_format
from gpuflow.spec.formatting import Pattern, TextBudget, text_of
from gpuflow.spec.report import Path, one_of, show, suggest

#: Names of the templates; without one it is `columns`.
NAMES: Final = ("columns", "two_column_briefing", "format", "text")


def check_template(template: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield what is wrong with a template before its values are known: path below `template`, and message."""
    name, columns = template.get("name") or "columns", template.get("columns") or []
    if name not in NAMES:
        yield ("name",), f"is {show(name)}, which is no template; it must be {one_of(NAMES)}{suggest(name, NAMES)}"
        return
    if not isinstance(columns, list) or not all(isinstance(column, Mapping) for column in columns):
        return  # the model says so
    least = {"columns": 1, "two_column_briefing": 2}.get(name, 0)
    if len(columns) < least:
        yield ("columns",), f"has {len(columns)} columns; a template {name} has at least {least}"
    labels: dict[str, None] = {}
    for index, column in enumerate(columns):
        label = str(column.get("label"))
        if label in labels:
            yield ("columns", index, "label"), f"is {show(label)}, as another column; rename one"
        labels[label] = None
        rows = column.get("data")
        if rows is not None and (
            not isinstance(rows, Mapping) or set(rows) - {"type", "items"} or not isinstance(rows.get("items"), list)
        ):
            yield ("columns", index, "data"), f"is {show(rows)}; it must be {{type: list, items: [...]}}"
    if not isinstance(template.get("options") or {}, Mapping):
        yield ("options",), f"is {show(template['options'])}; options must be a mapping"
        return
    known = {"columns": {"intro", "closing"}, "two_column_briefing": {"intro", "closing", "role"}, "format": {"format"}}
    for option in sorted(set(map(str, template.get("options") or {})) - known.get(name, set())):
        fields = one_of(sorted(known.get(name, ()))) if known.get(name) else "none"
        yield ("options", option), f"is no option of a template {name}; the options are {fields}"
    if (template.get("text") is not None) != (name == "text"):
        yield ("text",), "belongs to a template `text`, and one of that name has it"
    if name == "format":
        yield from check_format(labels, template.get("options"))


def render(template: Mapping[str, Any]) -> list[Any]:
    """Return the prompts, one a row: texts, or chats of a template `format`. Raises ValueError with the cause."""
    columns = [(str(column["label"]), _value(column)) for column in template.get("columns") or ()]
    options = template.get("options") or {}
    if not isinstance(options, Mapping):
        raise ValueError("options must be a mapping")
    name = template.get("name") or "columns"
    if name == "format":
        return list(render_format(columns, options["format"]))
    if name == "text":
        return [_text_template(str(template.get("text") or ""), columns)]
    return _RENDERERS[name](columns, options)


def _blocks(columns: Sequence[tuple[str, Any]], options: Mapping[str, Any]) -> list[str]:
    """Return one prompt a row: a heading and a value for each column, between `intro` and `closing`.

    A column whose value is a list gives one entry a row; any other value stands in every row.
    """
    lengths = {label: len(values) for label, values in columns if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label!r} has {length}" for label, length in lengths.items())
        raise ValueError(f"columns that are lists must be equally long, but {listed}")
    intro, closing = _lines(options.get("intro")), _lines(options.get("closing"))
    budget = TextBudget()
    prompts = []
    for row in range(next(iter(lengths.values()), 1)):
        blocks = (f"{label}:\n{text_of(v[row] if isinstance(v, list) else v)}" for label, v in columns)
        prompts.append(budget.join("\n\n", (part for part in chain((intro,), blocks, (closing,)) if part)))
    return prompts


def _briefing(columns: Sequence[tuple[str, Any]], options: Mapping[str, Any]) -> list[str]:
    """Return one prompt: who answers, a line for each column, and what to make of them."""
    if len(columns) < 2:
        raise ValueError("are too few: a two_column_briefing has at least two")
    role = str(options.get("role") or "energy strategist")
    article = "an" if role[:1].lower() in "aeiou" else "a"
    first, second = (label.lower() for label, _ in columns[:2])
    intro = _lines(options.get("intro")) or (
        f"Answer as {article} {role}. Weigh these analyses, one beside the other, and write a short briefing that "
        "compares them:"
    )
    closing = _lines(options.get("closing")) or (
        f"Write it in two columns, {first} against {second}, and end with recommendations that one can act on."
    )
    points = (f"• {label}: {_indented(text_of(value))}" for label, value in columns)
    return [TextBudget().join("\n", chain((intro,), points, (closing,)))]


def _text_template(text: str, columns: Sequence[tuple[str, Any]]) -> str:
    """Return the text with `{col0_label}` and `{col0_value}` replaced; other braces stay."""
    values: dict[str, Any] = {}
    for index, (label, value) in enumerate(columns):
        values |= {f"col{index}_label": label, f"col{index}_value": value}
    return Pattern(text).fill(values, TextBudget(), strict=False)


_RENDERERS: Final[Mapping[str, Callable[[Sequence[tuple[str, Any]], Mapping[str, Any]], list[str]]]] = {
    "columns": _blocks,
    "two_column_briefing": _briefing,
}


def _value(column: Mapping[str, Any]) -> Any:
    value = column.get("value")
    if value is None and isinstance(column.get("data"), Mapping):
        value = column["data"].get("items")
    if value is None:
        value = column.get("default")
    if value is None:
        raise ValueError(f"column {column['label']!r} has no value; give value, node and path, or expr")
    return value


def _indented(text: str) -> str:
    return text.replace("\r\n", "\n").strip().replace("\n", "\n  ")


def _lines(value: Any) -> str:
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value or "")
