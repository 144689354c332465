"""Puts training rows into the shape that TRL takes for a tokenizer: chats where it has a template, else plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def shape(rows: Sequence[Row], *, chat: bool, separator: str | None) -> list[dict[str, Any]]:
    """Return rows as TRL takes them.

    `chat` says whether the tokenizer has a chat template. Prompt and completion become a chat then, so that training
    sees what inference will send, unless `separator` asks for plain text. Without a template contents are joined.
    """
    return [_shaped(row, chat=chat, separator=separator) for row in rows]


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
