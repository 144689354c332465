"""Saves what a training made: a folder that appears whole, by rename, with its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.base import write_json_atomically
from gpuflow.checkpoints import flush

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from executors.modeling.location import Location


def save_final(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    base: Location,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a model or an adapter to `target`.

    An adapter names its base model by what `from_pretrained` takes: the id of the hub and its revision, or the folder
    of this machine that it was trained on. PEFT loads it by that; the name of a preset would mean nothing to it.
    `state` holds the weights where the model itself has only a part of them (`executors.distributed.gathering`).
    """
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        # Trainers that compare with the beginning keep it as an adapter of its own, "ref".
        only = {"selected_adapters": ["default"]} if "ref" in getattr(model, "peft_config", ()) else {}
        model.save_pretrained(fresh, state_dict=state, **only)
        tokenizer.save_pretrained(fresh)
        adapter = fresh / "adapter_config.json"
        if adapter.is_file():
            config = json.loads(adapter.read_text("utf-8"))
            revision = base.options.get("revision", config.get("revision"))
            write_json_atomically(adapter, {**config, "base_model_name_or_path": base.place, "revision": revision})
            (fresh / "README.md").unlink(missing_ok=True)
        flush(fresh)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
