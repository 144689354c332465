"""Puts training rows into the shape that TRL takes for a tokenizer: chats where it has a template, else plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]

_ANSWERS: Final = ("chosen", "rejected")


def shape(rows: Sequence[Row], *, chat: bool, separator: str | None) -> list[dict[str, Any]]:
    """Return rows as TRL takes them.

    `chat` says whether the tokenizer has a chat template. Prompt and completion become a chat then, so that training
    sees what inference will send, unless `separator` asks for plain text. Without a template contents are joined.
    """
    return [_shaped(row, chat=chat, separator=separator) for row in rows]


def shape_preferences(rows: Sequence[Row], *, chat: bool, separator: str | None) -> list[dict[str, Any]]:
    """Return rows of preferences as TRL takes them: all of them chats, or all of them texts.

    A row of texts with a prompt becomes a chat where the tokenizer has a template, unless `separator` asks for plain
    text. Rows without a prompt stay what they are: TRL finds what both answers begin with.
    """
    as_chat = chat and separator is None and all("prompt" in row or not isinstance(row["chosen"], str) for row in rows)
    return [_preference(row, as_chat=as_chat, separator=separator) for row in rows]


def _preference(row: Row, *, as_chat: bool, separator: str | None) -> dict[str, Any]:
    shaped = {role: _as_chat(row[role], "assistant") if as_chat else _joined(row[role]) for role in _ANSWERS}
    if "prompt" not in row:
        return shaped
    prompt = _as_chat(row["prompt"], "user") if as_chat else _joined(row["prompt"])
    # Public sets of preferences often repeat the prompt at the front of both answers: it is asked once.
    begin = len(prompt)
    if all(answer[:begin] == prompt and len(answer) > begin for answer in shaped.values()):
        shaped = {role: answer[begin:] for role, answer in shaped.items()}
    between = "\n" if separator is None else separator
    return {"prompt": prompt if as_chat else prompt + between, **shaped}


def shape_prompts(rows: Sequence[Row], *, chat: bool) -> list[dict[str, Any]]:
    """Return rows of prompts as TRL takes them, other columns unchanged: chats where the tokenizer has a template."""
    return [{**row, "prompt": _as_chat(row["prompt"], "user") if chat else _joined(row["prompt"])} for row in rows]


def _shaped(row: Row, *, chat: bool, separator: str | None) -> dict[str, Any]:
    if "text" in row:
        return {"text": row["text"]}
    if "messages" in row:
        return {"messages": row["messages"]} if chat else {"text": _joined(row["messages"])}
    prompt, completion = row["prompt"], row["completion"]
    if chat and separator is None:
        return {"prompt": _as_chat(prompt, "user"), "completion": _as_chat(completion, "assistant")}
    between = "\n" if separator is None else separator
    return {"prompt": _joined(prompt) + between, "completion": _joined(completion)}


def _as_chat(value: Any, role: str) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else "\n\n".join(message["content"] for message in value)
