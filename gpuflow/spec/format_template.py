"""The graph template `format`: texts that are made step by step of columns, and messages made of them. Pure.

    format:
      steps:                                   # may be left out
        - {label: plan, template: "Plan for {day}.", arguments: [{label: day, value: Days}]}
      messages:
        - {role: system, content: "Be brief."}
        - {role: user, content: plan}          # the value of a step or column, or text with {names} of them

A column that is a list gives one chat an entry; one of a single entry, or no list, stands in every chat. The other form
of a step, a function in Python, is code that a template brings: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuflow.spec.formatting import Pattern, TextBudget, listed, names_in, text_of
from gpuflow.spec.report import Path, one_of, show

#: Most steps and messages of one template, and most arguments of one step.
_MOST: Final = 100
_ROLES: Final = ("system", "user", "assistant", "tool")


def check_format(labels: Iterable[str], options: Any) -> Iterator[tuple[Path, str]]:
    """Yield what is wrong with a template `format` over columns of these labels: path below `template`, and message."""
    at: Path = ("options", "format")
    given = options.get("format") if isinstance(options, Mapping) else None
    if not isinstance(given, Mapping):
        yield at, f"is {show(given)}; a template `format` has options.format with messages, and steps"
        return
    for name in sorted(set(map(str, given)) - {"steps", "messages"}):
        yield (*at, name), "unknown field; the fields here are steps or messages"
    known = dict.fromkeys(labels)
    steps, messages = given.get("steps") or [], given.get("messages")
    if not isinstance(steps, list) or len(steps) > _MOST:
        yield (*at, "steps"), f"is {show(steps)}; it must be a list of at most {_MOST} steps"
        steps = []
    for index, step in enumerate(steps):
        yield from _check_step(step, known, (*at, "steps", index))
        if isinstance(step, Mapping) and isinstance(step.get("label"), str):
            known[step["label"]] = None
    if not isinstance(messages, list) or not 0 < len(messages) <= _MOST:
        yield (*at, "messages"), f"is {show(messages)}; it must be a list of 1 to {_MOST} messages"
        return
    for index, message in enumerate(messages):
        here = (*at, "messages", index)
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            yield here, f"is {show(message)}; a message has role, and content that is text"
        elif message.get("role") is None and message["content"] not in known:
            yield here, "has no role, so its content must be the label of a column that holds messages"
        elif message.get("role") is not None and message["role"] not in _ROLES:
            yield (*here, "role"), f"is {show(message['role'])}; it must be {one_of(_ROLES)}"


def _check_step(step: Any, known: Mapping[str, None], at: Path) -> Iterator[tuple[Path, str]]:
    if not isinstance(step, Mapping) or not isinstance(step.get("label"), str):
        yield at, f"is {show(step)}; a step has label, template and arguments"
        return
    if "function" in step:
        yield (
            (*at, "function"),
            "is code that the template brings, which is not run; write template, or a stage of its own",
        )
        return
    if not isinstance(step.get("template"), str):
        yield (*at, "template"), f"is {show(step.get('template'))}; it must be text with {{names}}"
        return
    arguments = step.get("arguments") or []
    if not isinstance(arguments, list) or len(arguments) > _MOST:
        yield (*at, "arguments"), f"is {show(arguments)}; it must be a list of at most {_MOST} {{label, value}}"
        return
    names: dict[str, None] = {}
    for index, argument in enumerate(arguments):
        here = (*at, "arguments", index)
        if not isinstance(argument, Mapping) or not all(isinstance(argument.get(k), str) for k in ("label", "value")):
            yield here, f"is {show(argument)}; an argument is {{label, value}}, its value the label of a column or step"
            continue
        names[argument["label"]] = None
        if argument["value"] not in known:
            yield (
                (*here, "value"),
                f"is {show(argument['value'])}; the columns and steps before it are {listed(known)}",
            )
    for name in dict.fromkeys(names_in(step["template"])):
        if name not in names:
            yield (*at, "template"), f"has {{{name}}}, which no argument gives; the arguments are {listed(names)}"


def render_format(columns: Sequence[tuple[str, Any]], given: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield one chat a row. Raises ValueError for columns that do not go together, or a value that does not fit."""
    values = {label: value if isinstance(value, list) else [value] for label, value in columns}
    budget = TextBudget()
    for step in given.get("steps") or ():
        pattern = Pattern(step["template"])
        wanted = {one["label"]: one["value"] for one in step.get("arguments") or () if one["label"] in pattern.names}
        rows = _rows({label: values[label] for label in wanted.values()})
        values[step["label"]] = [pattern.fill(_at_row(wanted, values, row), budget, strict=True) for row in range(rows)]
    messages = [(message, _pattern(message, values)) for message in given["messages"]]
    for row in range(_rows(values)):
        yield list(_messages(messages, values, row, budget))


def _pattern(message: Mapping[str, Any], values: Mapping[str, Any]) -> Pattern | None:
    """Return the text with names that a message is; None for one that is the value of a step or column."""
    return None if message.get("role") is None or message["content"] in values else Pattern(message["content"])


def _at_row(wanted: Mapping[str, str], values: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    return {name: _at(values[label], row) for name, label in wanted.items()}


def _messages(
    wanted: Sequence[tuple[Mapping[str, Any], Pattern | None]],
    values: Mapping[str, Sequence[Any]],
    row: int,
    budget: TextBudget,
) -> Iterator[dict[str, Any]]:
    for message, pattern in wanted:
        content, role = message["content"], message.get("role")
        if role is None:
            chat = _at(values[content], row)
            if not isinstance(chat, list) or not all(isinstance(one, Mapping) and "role" in one for one in chat):
                raise ValueError(f"{content!r} is no chat, and the message that takes it has no role")
            for one in chat:
                budget.charge(str(one.get("content")))
                yield dict(one)
        elif pattern is None:
            yield {"role": role, "content": budget.charge(text_of(_at(values[content], row)))}
        else:
            names = {name: name for name in pattern.names if name in values}
            yield {"role": role, "content": pattern.fill(_at_row(names, values, row), budget, strict=False)}


def _rows(values: Mapping[str, Sequence[Any]]) -> int:
    empty = [label for label, found in values.items() if not found]
    if empty:
        raise ValueError(f"{empty[0]!r} has no entries")
    lengths = {label: len(found) for label, found in values.items() if len(found) > 1}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label!r} has {length}" for label, length in lengths.items())
        raise ValueError(f"columns that are lists must be equally long, but {listed}")
    return next(iter(lengths.values()), 1)


def _at(found: Sequence[Any], row: int) -> Any:
    return found[row] if len(found) > 1 else found[0]
