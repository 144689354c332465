"""Gives the columns of training rows their roles: prompt and completion, messages, or text. Pure.

The data section names columns by `columns: {role: column}` or `column`; without either, usual names are recognised.
Every row is checked, so that a mistake is told before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from executors.base import bad_input

#: Roles of a training row, one group each; the first group whose columns are there is taken.
FORMS: Final = (("messages",), ("prompt", "completion"), ("text",))
#: Usual names of columns, where a data section names none.
_USUAL: Final = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "completion": "completion"},
    {"prompt": "question", "completion": "answer"},
    {"prompt": "instruction", "completion": "output"},
    {"prompt": "input", "completion": "output"},
    {"prompt": "prompt", "completion": "response"},
    {"text": "text"},
)


def training_rows(rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows with the keys of one form: {messages}, {prompt, completion} or {text}.

    Raises ExecutorError: BadInput naming the columns found, or the row whose value is of a wrong type.
    """
    roles = _roles(rows, data)
    done = []
    for index, row in enumerate(rows):
        missing = [column for column in roles.values() if row.get(column) is None]
        if missing:
            found = ", ".join(map(str, row)) or "none"
            raise bad_input(f"data row {index} lacks {', '.join(map(repr, missing))}; its columns are: {found}")
        done.append({role: _checked(row[column], role, index) for role, column in roles.items()})
    return done


def _roles(rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> dict[str, str]:
    found = list(dict.fromkeys(str(column) for row in rows[:100] for column in row))
    listed = ", ".join(found) or "none"
    given: dict[str, str] = dict(data.get("columns") or {})
    if not given and data.get("column"):
        given = {"text": str(data["column"])}
    if given:
        for form in FORMS:
            if set(form) == set(given):
                absent = [column for column in given.values() if column not in found]
                if absent:
                    raise bad_input(f"data.columns names {', '.join(absent)}, but the columns found are: {listed}")
                return given
        raise bad_input(
            f"data.columns has the roles {', '.join(given)}; training takes messages, or prompt and completion, "
            f"or text (the columns found are: {listed})"
        )
    for usual in _USUAL:
        if all(column in found for column in usual.values()):
            return dict(usual)
    raise bad_input(
        "the data has neither messages, nor prompt and completion, nor text; the columns found are: "
        f"{listed}; say which is which by data.columns, as in {{prompt: question, completion: answer}}"
    )


def _checked(value: Any, role: str, index: int) -> Any:
    if role == "messages" or (role != "text" and isinstance(value, list)):
        return checked_messages(value, f"data row {index}: {role}")
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, str):
        return value
    raise bad_input(f"data row {index}: {role} is {type(value).__name__}; it must be text")


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages `[{role, content}]`. Raises ExecutorError: BadInput."""
    if not isinstance(value, list) or not value:
        raise bad_input(f"{where} must be a list of messages, each with role and content")
    for number, message in enumerate(value):
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise bad_input(f"{where}[{number}] must have a role and a content, both text")
    return [_message(message) for message in value]


_SHAREGPT: Final = {"human": "user", "gpt": "assistant"}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return {"role": message["role"], "content": message["content"]}
    return {"role": _SHAREGPT.get(message["from"], message["from"]), "content": message["value"]}
