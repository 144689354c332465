"""Reads chat messages and the tools that are offered in them: all that a chat template writes, nothing dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from executors.base import bad_input

_SHAREGPT: Final = {"human": "user", "gpt": "assistant"}
#: Parts of a message beside role and content that chat templates write.
_TEXTS: Final = ("name", "tool_call_id", "reasoning_content")
#: Parts that change what a message means and that nothing here can carry, with what to do instead.
_REFUSED: Final = {
    "function_call": "write it as tool_calls",
    "weight": "leave the message out, or train on the answers alone (assistant_only_loss)",
    "audio": "only text is read",
}


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages `[{role, content}]`, with the tool calls and names that they have.

    The arguments of a call become an object where they are the JSON text of one, as templates write them out again.
    Raises ExecutorError: BadInput.
    """
    if not isinstance(value, list) or not value:
        raise bad_input(f"{where} must be a list of messages, each with role and content")
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(value)]


def checked_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools `[{type: function, function: {name, ...}}]`, given as a list or as its JSON text; None for none.

    Raises ExecutorError: BadInput.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_input(f"{where} is text that is no JSON; give a list of tools") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(tool_name(tool) for tool in value):
        raise bad_input(f"{where} must be a list of tools, each with a function that has a name")
    return [dict(tool) for tool in value]


def tool_name(tool: Any) -> str | None:
    """Return the name of a tool or of a call, which stands in `function` or beside it; None where there is none."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def uses_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether only a chat template that knows tools can write these messages."""
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if calls and content is None:
        content = ""  # the form of OpenAI's API
    if not isinstance(role, str) or not isinstance(content, str):
        raise bad_input(f"{where} must have a role and a content, both text")
    for name, mend in _REFUSED.items():
        if message.get(name) is not None:
            raise bad_input(f"{where} has {name}, which would be lost; {mend}")
    checked = {"role": role if "role" in message else _SHAREGPT.get(role, role), "content": content}
    for name in _TEXTS:
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise bad_input(f"{where}.{name} must be text")
            checked[name] = message[name]
    return {**checked, "tool_calls": _calls(calls, f"{where}.tool_calls")} if calls else checked


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(tool_name(call) for call in value):
        raise bad_input(f"{where} must be a list of calls, each with a function that has a name")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(value)]


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if arguments is not None and not isinstance(arguments, Mapping):
        arguments = None
    if arguments is None and function.get("arguments") is not None:
        raise bad_input(f"{where}: arguments must be an object, or the JSON text of one")
    if arguments is not None:
        function["arguments"] = arguments
    return {**call, "function": function} if "function" in call else function
