"""Puts training rows into the shape that TRL takes for a tokenizer: chats where it has a template, else plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from executors.base import bad_input
from executors.data.messages import tool_name, uses_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

_ANSWERS: Final = ("chosen", "rejected")
_NO_TEMPLATE: Final = (
    "which only a chat template can write; take a model that has one (and no data.separator), or leave them out"
)


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
    if row.get("tools"):
        shaped["tools"] = _offered(row, as_chat=as_chat)
    if "prompt" not in row:
        return shaped
    prompt = _as_chat(row["prompt"], "user") if as_chat else _joined(row["prompt"])
    # Public sets of preferences often repeat the prompt at the front of both answers: it is asked once.
    begin = len(prompt)
    if all(shaped[role][:begin] == prompt and len(shaped[role]) > begin for role in _ANSWERS):
        shaped |= {role: shaped[role][begin:] for role in _ANSWERS}
    between = "\n" if separator is None else separator
    return {"prompt": prompt if as_chat else prompt + between, **shaped}


def shape_prompts(rows: Sequence[Row], *, chat: bool) -> list[dict[str, Any]]:
    """Return rows of prompts as TRL takes them, other columns unchanged: chats where the tokenizer has a template."""
    return [{**row, "prompt": _as_chat(row["prompt"], "user") if chat else _joined(row["prompt"])} for row in rows]


def _shaped(row: Row, *, chat: bool, separator: str | None) -> dict[str, Any]:
    if "text" in row:
        return {"text": row["text"]}
    tools = (
        {"tools": _offered(row, as_chat=chat and ("messages" in row or separator is None))} if "tools" in row else {}
    )
    if "messages" in row:
        return {"messages": row["messages"], **tools} if chat else {"text": _joined(row["messages"])}
    prompt, completion = row["prompt"], row["completion"]
    if chat and separator is None:
        return {"prompt": _as_chat(prompt, "user"), "completion": _as_chat(completion, "assistant"), **tools}
    between = "\n" if separator is None else separator
    return {"prompt": _joined(prompt) + between, "completion": _joined(completion)}


def _as_chat(value: Any, role: str) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _offered(row: Row, *, as_chat: bool) -> Any:
    if not as_chat:
        raise bad_input(f"the data has tools, {_NO_TEMPLATE}")
    return row["tools"]


def _joined(value: Any) -> str:
    if isinstance(value, str):
        return value
    if uses_tools(value):
        raise bad_input(f"the data has tool calls, {_NO_TEMPLATE}")
    return "\n\n".join(message["content"] for message in value)


def check_tools(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Refuse rows of which the chat template would leave out a tool or a call.

    Many templates know no tools and write such messages as empty ones. Without a template there is nothing to ask:
    the shape of the rows refuses them. Raises ExecutorError: BadInput.
    """
    if not tokenizer.chat_template:
        return
    for index, row in enumerate(rows):
        chats = [
            row[role] for role in ("messages", "prompt", "completion", *_ANSWERS) if isinstance(row.get(role), list)
        ]
        calls = [call for chat in chats for message in chat for call in message.get("tool_calls") or ()]
        names = {tool_name(tool) for tool in (*(row.get("tools") or ()), *calls)} - {None}
        if not names:
            continue
        written = _written([message for chat in chats for message in chat], row.get("tools"), tokenizer, index)
        lost = sorted(name for name in names if name and name not in written)
        if lost:
            raise bad_input(
                f"data row {index}: the chat template of {model} leaves out the tool {lost[0]!r}, so the training "
                f"would not see it; take a model whose template knows tools, or leave tools and tool calls out"
            )


def _written(messages: list[Any], tools: Any, tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except Exception as error:  # a template is a program of the model's author
        raise bad_input(f"data row {index}: the chat template cannot write it: {str(error)[:300]}") from error
