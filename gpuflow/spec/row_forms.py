"""The forms of a row, and the columns by which each is recognised where a template names none. Data and one question.

Executors read rows by it, and the checker looks at rows that stand in a template. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

#: The roles of each form of a row.
Roles = tuple[tuple[str, ...], ...]

SUPERVISED_ROLES: Final[Roles] = (("messages",), ("prompt", "completion"), ("text",))
PREFERENCE_ROLES: Final[Roles] = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
PROMPT_ROLES: Final[Roles] = (("prompt",), ("messages",))

#: Role -> column, of each form of a row: the first whose columns are all there is taken.
Usual = tuple[Mapping[str, str], ...]

SUPERVISED: Final[Usual] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "completion": "completion"},
    {"prompt": "question", "completion": "answer"},
    {"prompt": "instruction", "completion": "output"},
    {"prompt": "input", "completion": "output"},
    {"prompt": "prompt", "completion": "response"},
    {"text": "text"},
)
PREFERENCES: Final[Usual] = (
    *(
        {"prompt": prompt, "chosen": "chosen", "rejected": "rejected"}
        for prompt in ("prompt", "question", "instruction", "input")
    ),
    {"chosen": "chosen", "rejected": "rejected"},
)
PROMPTS: Final[Usual] = (
    {"prompt": "prompt"},
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "question"},
    {"prompt": "instruction"},
    {"prompt": "query"},
    {"prompt": "text"},
)
#: Columns that hold the prompt of a record that is answered.
ASKED: Final = ("messages", "prompt", "question", "instruction", "input", "text")
#: Columns that hold the text of a record that is embedded.
TEXTS: Final = ("text", "input", "sentence", "passage", "content", "prompt", "question")

#: Task type -> its usual forms.
USUAL: Final[Mapping[str, Usual]] = {
    "sft": SUPERVISED,
    "lora_sft": SUPERVISED,
    "dpo": PREFERENCES,
    "reward": PREFERENCES,
    "ppo": PROMPTS,
    "grpo": PROMPTS,
    "inference": tuple({"prompt": column} for column in ASKED),
    "embedding": tuple({"text": column} for column in TEXTS),
}


def is_recognised(columns: Iterable[str], task_type: str) -> bool:
    """Say whether rows with these columns have one of the usual forms of a task type; yes for one that has none."""
    found = set(columns)
    return task_type not in USUAL or any(found.issuperset(form.values()) for form in USUAL[task_type])
