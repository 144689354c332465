"""Gives the columns of training rows their roles: what a row is to its trainer. Pure.

The data section names columns by `columns: {role: column}` or `column`; without either, usual names are recognised.
Every row is checked, so that a mistake is reported before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from executors.base import bad_input
from executors.data.messages import checked_messages, checked_tools
from gpuflow.spec import row_forms

Row = Mapping[str, Any]

_TOOLS: Final = "tools"


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The forms of a row that a trainer takes.

    `groups` are the roles of each form, `usual` names of columns for them, where a data section names none: the first
    whose columns are there is taken. `single` is the role of `data.column`; `words` say it to the user. Chats of a form
    that `takes_tools` may come with a column `tools`, the tools that were offered in them.
    """

    groups: tuple[tuple[str, ...], ...]
    usual: tuple[Mapping[str, str], ...]
    single: str
    words: str
    lacking: str
    takes_tools: bool = True


SUPERVISED: Final = Forms(
    groups=row_forms.SUPERVISED_ROLES,
    usual=row_forms.SUPERVISED,
    single="text",
    words="messages, or prompt and completion, or text",
    lacking="neither messages, nor prompt and completion, nor text",
)
PREFERENCES: Final = Forms(
    groups=row_forms.PREFERENCE_ROLES,
    usual=row_forms.PREFERENCES,
    single="chosen",
    words="prompt, chosen and rejected, or chosen and rejected",
    lacking="no chosen and rejected",
)
PROMPTS: Final = Forms(
    groups=row_forms.PROMPT_ROLES,
    usual=row_forms.PROMPTS,
    single="prompt",
    words="prompt, or messages",
    lacking="neither prompt nor messages",
    takes_tools=False,
)


def training_rows(rows: Sequence[Row], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows with the keys of one form: {messages}, {prompt, completion} or {text}; `tools` beside chats.

    Raises ExecutorError: BadInput naming the columns found, or the row whose value is of a wrong type.
    """
    return _with_roles(rows, _roles(rows, data, SUPERVISED))


def with_text_column(rows: Sequence[Row], data: Mapping[str, Any], column: str) -> tuple[Mapping[str, Any], str | None]:
    """Return the data section where TRL's `dataset_text_field` names `column`, and a warning where that is not used.

    The name counts for rows of texts alone, and only where the section itself names no columns.
    """
    named = (data.get("columns") or {}).get("text", data.get("column"))
    if data.get("columns") or named:
        unused = "the section data names the columns" if named != column else None
    else:
        usual = _usual(rows[:100], _columns(rows), SUPERVISED)
        if usual is None or "text" in usual:
            return {**data, "column": column}, None
        unused = f"the rows have {' and '.join(usual.values())}; data.column: {column} trains on that column as text"
    return data, unused and f"training.dataset_text_field {column!r} is not used: {unused}"


def preference_rows(rows: Sequence[Row], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows with {prompt, chosen, rejected}, or {chosen, rejected} where both begin with the prompt.

    `tools` stand beside chats. The values of a row are texts or chat messages. Raises ExecutorError: BadInput naming
    the columns found, or the row that prefers nothing: an answer is empty, or both are equal.
    """
    done = _with_roles(rows, _roles(rows, data, PREFERENCES))
    for index, row in enumerate(done):
        empty = [role for role in ("chosen", "rejected") if not row[role]]
        if empty:
            raise bad_input(f"data row {index}: {empty[0]} is empty; give the answer, or leave the row out")
        if row["chosen"] == row["rejected"]:
            raise bad_input(f"data row {index}: chosen and rejected are equal; leave the row out")
        if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
            raise bad_input(f"data row {index}: chosen and rejected must both be text, or both be messages")
    return done


def prompt_rows(rows: Sequence[Row], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows with {prompt}, a text or chat messages that end before the answer, and the other plain columns.

    Reward functions read the other columns (`answer`, for example). Raises ExecutorError: BadInput naming the columns
    found, or the row whose prompt is empty.
    """
    roles = _roles(rows, data, PROMPTS)
    done = _with_roles(rows, roles)
    (column,) = roles.values()
    others = [name for name in rows[0] if name != column and all(_is_plain(row.get(name)) for row in rows)]
    shaped = []
    for index, (row, given) in enumerate(zip(done, rows, strict=True)):
        prompt = row["prompt"] if "prompt" in row else _before_the_answer(row["messages"])
        if not prompt:
            raise bad_input(f"data row {index}: the prompt is empty; give a text, or messages that ask something")
        shaped.append({"prompt": prompt, **{_free(name): str(given[name]) for name in others}})
    return shaped


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _free(name: str) -> str:
    """Return the name of another column: `prompt` is taken where the prompt comes from a column of another name."""
    return f"{name}_column" if name in ("prompt", "prompts", "completions") else name


def _before_the_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return asked


def _with_roles(rows: Sequence[Row], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    done = []
    for index, row in enumerate(rows):
        missing = [column for role, column in roles.items() if role != _TOOLS and row.get(column) is None]
        if missing:
            found = ", ".join(map(str, row)) or "none"
            raise bad_input(f"data row {index} lacks {', '.join(map(repr, missing))}; its columns are: {found}")
        shaped = {role: _checked(row[column], role, index) for role, column in roles.items() if role != _TOOLS}
        tools = checked_tools(row.get(roles[_TOOLS]), f"data row {index}: tools") if _TOOLS in roles else None
        if tools and not any(isinstance(value, list) for value in shaped.values()):
            raise bad_input(f"data row {index} has tools, and no messages in which they are offered")
        done.append({**shaped, _TOOLS: tools} if tools else shaped)
    return done


def _roles(rows: Sequence[Row], data: Mapping[str, Any], forms: Forms) -> dict[str, str]:
    found = _columns(rows)
    listed = ", ".join(found) or "none"
    given: dict[str, str] = dict(data.get("columns") or {})
    if not given and data.get("column"):
        given = {forms.single: str(data["column"])}
    if not given and not forms.takes_tools and any(row.get(_TOOLS) for row in rows):
        raise bad_input("the data has tools, which this training does not offer; leave the column out")
    if given:
        for form in forms.groups:
            if set(form) == set(given) - ({_TOOLS} if forms.takes_tools else set()):
                absent = [column for column in given.values() if column not in found]
                if absent:
                    raise bad_input(f"data.columns names {', '.join(absent)}, but the columns found are: {listed}")
                return given
        raise bad_input(
            f"data.columns has the roles {', '.join(given)}; training takes {forms.words} "
            f"(the columns found are: {listed})"
        )
    usual = _usual(rows[:100], found, forms)
    if usual:
        return {**usual, **({_TOOLS: _TOOLS} if forms.takes_tools and _TOOLS in found else {})}
    example = ", ".join(
        f"{role}: {_EXAMPLES[role]}" for role in next(form for form in forms.groups if "prompt" in form)
    )
    raise bad_input(
        f"the data has {forms.lacking}; the columns found are: {listed}; say which is which by data.columns, as in "
        f"{{{example}}}"
    )


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows[:100] for column in row))


def _usual(rows: Sequence[Row], found: Sequence[str], forms: Forms) -> Mapping[str, str] | None:
    """Return the usual names that most rows have, so that a row of another form is the one to be blamed; None for none.

    Of two forms of which one has all columns of the other and more, the larger one is meant.
    """
    there = [usual for usual in forms.usual if all(column in found for column in usual.values())]
    whole = [one for one in there if not any(set(one.values()) < set(other.values()) for other in there)]
    return max(
        whole,
        key=lambda usual: sum(all(row.get(column) is not None for column in usual.values()) for row in rows),
        default=None,
    )


_EXAMPLES: Final = {"prompt": "question", "completion": "answer", "chosen": "better", "rejected": "worse"}


def _checked(value: Any, role: str, index: int) -> Any:
    if role == "messages" or (role != "text" and isinstance(value, list)):
        return checked_messages(value, f"data row {index}: {role}")
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, str):
        return value
    raise bad_input(f"data row {index}: {role} is {type(value).__name__}; it must be text")
