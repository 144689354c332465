"""From items to prompt texts: chat template and system prompt, or plain text where a tokenizer has no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from executors.base import bad_input
from executors.data.messages import checked_messages, uses_tools
from gpuflow.spec.row_forms import ASKED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Columns that hold the prompt of a record, the first that is there.
_PROMPT_COLUMNS: Final = ASKED
#: Field of a record that comes back beside its answer.
_METADATA: Final = "metadata"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request: the item as given, and its chat."""

    index: int
    given: Any
    messages: tuple[Mapping[str, Any], ...]

    @property
    def shown(self) -> dict[str, Any]:
        """What an item shows of it: `input`, and `metadata` where the record has some.

        A record of a prompt and its metadata alone is shown as the prompt.
        """
        given = self.given
        metadata = given.get(_METADATA) if isinstance(given, Mapping) else None
        if not isinstance(metadata, Mapping):
            return {"input": given}
        rest = {name: value for name, value in given.items() if name != _METADATA}
        alone = next(iter(rest.values())) if set(rest) in ({"prompt"}, {"messages"}) else rest
        return {"input": alone, _METADATA: metadata}


def read_prompts(entries: Sequence[Any], data: Mapping[str, Any]) -> list[Prompt]:
    """Return one prompt for every entry: text, a list of messages, or a record with `messages` or a prompt column.

    `data.columns` or `data.column` name the column. Raises ExecutorError: BadInput naming the entry.
    """
    if not entries:
        raise bad_input("the task has no prompts; give data.items, data.prompts or a data file with rows")
    columns = data.get("columns") or {}
    if columns and not {"messages", "prompt", "text"} & set(columns):
        raise bad_input(
            f"data.columns has the roles {', '.join(columns)}; inference takes messages, prompt or text"
            f" (the columns found are: {_found(entries)})"
        )
    column = columns.get("messages") or columns.get("prompt") or columns.get("text") or data.get("column")
    return [_read(entry, index, column) for index, entry in enumerate(entries)]


def _found(entries: Sequence[Any]) -> str:
    names = dict.fromkeys(str(name) for entry in entries[:100] if isinstance(entry, Mapping) for name in entry)
    return ", ".join(names) or "none"


def _read(entry: Any, index: int, column: str | None) -> Prompt:
    value = entry
    if isinstance(entry, Mapping):
        names = [column] if column else list(_PROMPT_COLUMNS)
        name = next((name for name in names if entry.get(name) is not None), None)
        if name is None:
            found = ", ".join(map(str, entry)) or "none"
            wanted = repr(column) if column else "messages or prompt"
            raise bad_input(f"data item {index} has no {wanted}; its columns are: {found}")
        value = entry[name]
        if isinstance(value, list) and entry.get("tools"):
            raise bad_input(
                f"data item {index} has tools, which would not reach the model; give them to every item by "
                "inference.chat_template_kwargs: {tools: [...]}"
            )
    if isinstance(value, list):
        return Prompt(index=index, given=entry, messages=tuple(checked_messages(value, f"data item {index}")))
    if isinstance(value, bool | int | float):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise bad_input(f"data item {index} is {type(value).__name__}; a prompt is text or a list of messages")
    return Prompt(index=index, given=entry, messages=({"role": "user", "content": value},))


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text that goes to the model; `templated` where a chat template made it, which writes its own begin token."""

    text: str
    templated: bool


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, inference: Mapping[str, Any]) -> Rendered:
    """Return the text that goes to the model.

    A tokenizer with a chat template formats the chat; without one the contents stand below each other. The system
    prompt of the task goes before a chat that has none of its own.
    """
    messages = list(prompt.messages)
    system = inference.get("system_prompt")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    template = inference.get("chat_template") or tokenizer.chat_template
    if not template:
        if uses_tools(messages):
            raise bad_input(
                f"data item {prompt.index} has tool calls, and the model has no chat template to write them"
            )
        return Rendered(text="\n\n".join(message["content"] for message in messages), templated=False)
    generate = inference.get("add_generation_prompt")
    ends_open = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=inference.get("chat_template"),
            tokenize=False,
            add_generation_prompt=not ends_open if generate is None else generate,
            continue_final_message=ends_open and not generate,
            **(inference.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        if type(error).__module__.startswith("jinja2"):
            raise bad_input(f"data item {prompt.index} does not fit the chat template: {error}") from error
        raise
    return Rendered(text=str(text), templated=True)


def encoded(prompts: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each prompt; in any thread. Only plain text is given the begin token of the tokenizer."""
    tokens: dict[int, list[int]] = {}
    for templated in (False, True):
        chosen = [number for number, prompt in enumerate(prompts) if prompt.templated is templated]
        if chosen:
            found = tokenizer([prompts[number].text for number in chosen], add_special_tokens=not templated)
            tokens |= zip(chosen, found["input_ids"], strict=True)
    return [tokens[number] for number in range(len(prompts))]
