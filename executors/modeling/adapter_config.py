"""Judges the configuration of an adapter before PEFT reads it: it comes with the adapter, from whoever made that.

PEFT opens what some kinds of adapters name, wherever it is: other adapters, or a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from executors.base import bad_input

#: Fields whose values PEFT opens as folders or repositories, or imports.
_NAMES_OTHERS: Final = ("adapters", "tokenizer_name_or_path", "tokenizer_kwargs", "megatron_core", "megatron_config")
#: What PEFT writes of its own where no such thing is meant.
_MEANS_NONE: Final = ("megatron.core",)


def judge_adapter(folder: Path) -> None:
    """Raise ExecutorError: BadInput for an adapter whose configuration names what is not its own, or is none."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise bad_input(f"{path} is not that of an adapter: {error}") from error
    if not isinstance(config, dict):
        raise bad_input(f"{path} is not that of an adapter: it holds no mapping")
    named = next((name for name in _NAMES_OTHERS if config.get(name) not in (None, {}, *_MEANS_NONE)), None)
    if named is not None:
        raise bad_input(
            f"{path} names by {named} what lies outside of the adapter, which is not opened for a task; "
            "use an adapter that holds all of its weights"
        )
