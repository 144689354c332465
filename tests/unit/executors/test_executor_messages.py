"""Chat messages and tools: nothing of them is dropped in silence."""

from __future__ import annotations

import json

import pytest

from executors.base import ExecutorError
from executors.data.columns import preference_rows, prompt_rows, training_rows
from executors.data.messages import checked_messages
from executors.generation.prompts import read_prompts
from executors.training.shaping import check_tools, shape, shape_preferences, shape_prompts

ASK = {"role": "user", "content": "How warm is it in Rome?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "content": "21", "name": "weather", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class Tokenizer:
    """Writes chats as a template would: with tools, or without."""

    chat_template = "x"

    def __init__(self, *, knows_tools: bool) -> None:
        self._knows_tools = knows_tools

    def apply_chat_template(self, messages, *, tools, tokenize):
        assert tokenize is False
        text = " ".join(message["content"] for message in messages)
        return text + (json.dumps([tools, messages]) if self._knows_tools else "")


def test_tool_calls_and_the_names_of_tools_are_kept():
    assert checked_messages([ASK, CALLS, ANSWER], "here") == [ASK, CALLS, ANSWER]


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
@pytest.mark.parametrize("content", [None, ""])
def test_calls_in_the_form_of_the_api_are_read(arguments, content):
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}

    assert checked_messages([{**CALLS, "content": content, "tool_calls": [call]}], "here") == [CALLS]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "assistant", "content": None}, "must have a role and a content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "must have a role and a content"),
        ({**CALLS, "tool_calls": "weather"}, r"here\[0\].tool_calls must be a list of calls"),
        ({**CALLS, "tool_calls": [{"function": {}}]}, "each with a function that has a name"),
        ({**CALLS, "tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments must be an object"),
        ({**CALLS, "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments must be an object"),
        ({**CALLS, "tool_calls": [{"name": "f", "arguments": 3}]}, "arguments must be an object"),
        ({**ASK, "weight": 0}, "has weight, which would be lost; leave the message out"),
        ({**ASK, "function_call": {"name": "f"}}, "write it as tool_calls"),
        ({**ANSWER, "name": 7}, "name must be text"),
        (7, "must have a role"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(message, says):
    with pytest.raises(ExecutorError, match=says):
        checked_messages([message], "here")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_column_of_tools_stays_beside_its_chat(tools):
    rows = training_rows([{"messages": [ASK, CALLS], "tools": tools}, {"messages": [ASK], "tools": None}], {})

    assert rows == [{"messages": [ASK, CALLS], "tools": TOOLS}, {"messages": [ASK]}]
    assert shape(rows, chat=True, separator=None) == rows


def test_a_column_of_tools_may_have_another_name():
    data = {"columns": {"messages": "chat", "tools": "functions"}}

    assert training_rows([{"chat": [ASK], "functions": TOOLS}], data) == [{"messages": [ASK], "tools": TOOLS}]


def test_tools_of_preferences_are_kept():
    row = {"prompt": [ASK], "chosen": [CALLS], "rejected": [{"role": "assistant", "content": "No."}], "tools": TOOLS}

    (shaped,) = shape_preferences(preference_rows([row], {}), chat=True, separator=None)

    assert shaped == row


@pytest.mark.parametrize(
    ("tools", "says"),
    [("{", "no JSON"), ("7", "must be a list of tools"), ([{}], "must be a list of tools"), (["f"], "a list of tools")],
)
def test_wrong_tools_are_told(tools, says):
    with pytest.raises(ExecutorError, match=says):
        training_rows([{"messages": [ASK], "tools": tools}], {})


def test_tools_without_a_chat_are_refused():
    with pytest.raises(ExecutorError, match="data row 0 has tools, and no messages"):
        training_rows([{"text": "Hello", "tools": TOOLS}], {})
    with pytest.raises(ExecutorError, match="which this training does not offer"):
        prompt_rows([{"prompt": "Hello", "tools": TOOLS}], {})


def test_without_a_template_they_are_refused():
    rows = training_rows([{"messages": [ASK, CALLS, ANSWER]}], {})
    with pytest.raises(ExecutorError, match="tool calls, which only a chat template can write"):
        shape(rows, chat=False, separator=None)
    with pytest.raises(ExecutorError, match="tools, which only a chat template can write"):
        shape([{"prompt": [ASK], "completion": "21", "tools": TOOLS}], chat=True, separator=" ")
    with pytest.raises(ExecutorError, match="tool calls, which only"):
        shape_prompts(prompt_rows([{"prompt": [ASK, CALLS, ANSWER]}], {}), chat=False)


def test_a_template_that_leaves_tools_out_is_refused():
    rows = training_rows([{"messages": [ASK]}, {"messages": [ASK, CALLS, ANSWER], "tools": TOOLS}], {})

    check_tools(rows, Tokenizer(knows_tools=True), "m")
    with pytest.raises(ExecutorError, match="data row 1: the chat template of m leaves out the tool 'weather'"):
        check_tools(rows, Tokenizer(knows_tools=False), "m")


def test_inference_refuses_tools_that_would_not_reach_the_model():
    assert read_prompts([{"messages": [ASK, CALLS, ANSWER]}], {})[0].messages == (ASK, CALLS, ANSWER)
    with pytest.raises(ExecutorError, match="chat_template_kwargs"):
        read_prompts([{"messages": [ASK], "tools": TOOLS}], {})
