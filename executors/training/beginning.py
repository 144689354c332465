"""What a training begins from: the weights alone, an adapter that is trained on, or adapters that are merged in first.

An adapter holds the difference to its base model alone. One that is merged into the weights before another is trained
is in neither of the two that the result names, so a result that is an adapter never has such a past.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executors.base import bad_input
from executors.modeling.adapter_config import judge_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Adapter = Mapping[str, Any]

#: Fields of `lora` that a trained adapter has fixed.
_FIXED_FIELDS: Final = ("r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "bias", "modules_to_save")
_MEND: Final = "set training.merge_adapter: true, which leaves final_model/ with all of it"


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """`continued` is the folder of the adapter that is trained on, `merged` those that become part of the weights."""

    continued: Path | None = None
    merged: tuple[Adapter, ...] = ()


def beginning(spec: Mapping[str, Any], adapters: Sequence[Adapter], *, is_lora: bool, may_continue: bool) -> Beginning:
    """Return what becomes of the adapters that a training is given.

    `may_continue` says whether the trainer takes an adapter of a language model to train on. Raises ExecutorError:
    BadInput where the result would be an adapter that lacks what it was trained on, or where `lora` contradicts the
    adapter.
    """
    checkpoint = spec.get("checkpoint") or {}
    if not adapters:
        if checkpoint.get("merge_first"):
            raise bad_input(
                "checkpoint.merge_first merges an adapter, and this training begins from none; leave it out"
            )
        return Beginning()
    leaves_adapter = is_lora and not (spec.get("training") or {}).get("merge_adapter")
    cause = _why_merged(checkpoint, adapters, may_continue=may_continue)
    if not is_lora or (cause and not leaves_adapter):
        return Beginning(merged=tuple(adapters))
    if cause:
        raise bad_input(f"{cause}, and final_lora/ would lack what it was trained on; {_MEND}")
    folder = Path(str(adapters[0]["path"]))
    _check_fixed_fields(spec.get("lora") or {}, folder)
    return Beginning(continued=folder)


def begin(model: PreTrainedModel, start: Beginning) -> PreTrainedModel:
    """Return the loaded model with what it begins from."""
    if start.continued is None:
        from executors.modeling.loading import merged

        return merged(model, start.merged)
    from peft import PeftModel

    judge_adapter(start.continued)
    trained: PreTrainedModel = PeftModel.from_pretrained(model, start.continued, is_trainable=True)
    return trained


def _why_merged(checkpoint: Mapping[str, Any], adapters: Sequence[Adapter], *, may_continue: bool) -> str | None:
    """Return why the adapters can only be merged into the weights; None where one of them can be trained on."""
    if checkpoint.get("merge_first"):
        return "checkpoint.merge_first merges the adapter into the weights"
    if len(adapters) > 1:
        return f"of {len(adapters)} adapters none can be trained on, they are merged into the weights"
    if adapters[0].get("weight") not in (None, 1, 1.0):
        return f"an adapter with weight {adapters[0]['weight']} is merged into the weights"
    if not may_continue:
        return "this trainer cannot train an adapter of a language model on, it is merged into the weights"
    return None


def _check_fixed_fields(lora: Mapping[str, Any], folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    for name in _FIXED_FIELDS:
        wanted = lora.get(name)
        if wanted is None or name not in config or _same(wanted, config[name]):
            continue
        raise bad_input(
            f"lora.{name} is {wanted!r}, and the adapter that this training goes on with has {config[name]!r}; leave "
            f"it out, or begin a new adapter: checkpoint.merge_first: true with training.merge_adapter: true"
        )


def _same(wanted: Any, fixed: Any) -> bool:
    if wanted == "all-linear":
        return True  # the adapter lists the modules that this meant when it was made
    if isinstance(wanted, list) and isinstance(fixed, list):
        return sorted(map(str, wanted)) == sorted(map(str, fixed))
    return bool(wanted == fixed)
