"""Layers of an adapter on a model: put on whole or refused, and taken off again. Used by `adapter_switch` alone.

A language model's adapter also serves the model without its output layer, whose layers have shorter names: `headless`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executors.base import ExecutorError, bad_input
from executors.failures import classify
from executors.modeling.adapter_config import judge_adapter

if TYPE_CHECKING:
    from peft import PeftConfig

#: What PEFT writes before the names of a model's own layers.
_BASE: Final = "base_model.model."
_WEIGHTS: Final = "adapter_model.safetensors"
#: Longest part of a library's complaint that an error repeats, in characters: it names every layer.
_SHOWN: Final = 400


def read_config(folder: Path, model: Any, *, headless: bool) -> PeftConfig:
    """Return the configuration of an adapter for this model. Raises ExecutorError: BadInput.

    Refused is what would change the weights of the model itself, as every other request is answered with them.
    """
    from peft import PeftConfig

    judge_adapter(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise bad_input(f"{folder}/adapter_config.json is not that of an adapter: {error}") from error
    config.task_type = "FEATURE_EXTRACTION" if headless else "CAUSAL_LM"
    config.inference_mode = True
    if headless:
        _shorten(config, model)
    own = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    kept = tuple(getattr(config, "modules_to_save", None) or ())
    changed = [
        name
        for name in (_in_model(key, model, headless=headless) for key in _names(folder))
        if name in own and not set(kept) & set(name.split("."))
    ]
    if changed or getattr(config, "bias", "none") != "none":
        raise bad_input(
            f"the adapter {folder} changes weights of the model itself ({changed[0] if changed else 'its biases'}); "
            "merge it into the model, and name that as the model"
        )
    return config


def with_adapter(model: Any, tuned: Any, name: str, folder: Path, config: PeftConfig, *, headless: bool) -> Any:
    """Put an adapter on a model, or on `tuned`, the one that has others already, and return the model with it.

    Raises ExecutorError: BadInput for one that does not fit whole. Then, and after any failure, `strip` is due.
    """
    from peft import PeftModelForCausalLM, PeftModelForFeatureExtraction

    mapping = {rf"^{re.escape(model.base_model_prefix)}\.": ""} if headless and _has_prefix(folder, model) else None
    try:
        if tuned is None:
            kind = PeftModelForFeatureExtraction if headless else PeftModelForCausalLM
            tuned = kind(model, config, adapter_name=name)
        else:
            tuned.add_adapter(name, config)
        found = tuned.load_adapter(str(folder), adapter_name=name, key_mapping=mapping)
    except Exception as error:
        if isinstance(error, ExecutorError) or classify(error)["type"] != type(error).__name__:
            raise
        why = " ".join(str(error).split())[:_SHOWN]
        raise bad_input(f"the adapter {folder} does not fit the model: {why}") from error
    without = [key for key in found.missing_keys if name in key.split(".")]
    over = [key for key in found.unexpected_keys if not (headless and _of_head(key, model))]
    if without or over:
        raise bad_input(
            f"the adapter {folder} does not fit the model: it has {len(over)} weights that have no place in it"
            f"{_such_as(over)}, and lacks {len(without)}{_such_as(without)}"
        )
    return tuned


def strip(model: Any) -> None:
    """Take all layers of adapters off a model, also where putting them on has failed half way."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in list(model.named_modules()):
        own: Any = None
        if isinstance(module, BaseTunerLayer):
            own = module.get_base_layer()
        elif isinstance(module, AuxiliaryTrainingWrapper):
            own = module.original_module
        if own is not None:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, own)
    if hasattr(model, "peft_config"):
        del model.peft_config


def _names(folder: Path) -> Iterable[str]:
    """The names of an adapter's weights; none where they are no safetensors: then PEFT says what is wrong."""
    from safetensors import SafetensorError, safe_open

    path = folder / _WEIGHTS
    if not path.is_file():
        return ()
    try:
        with safe_open(path, framework="pt") as weights:
            return tuple(weights.keys())
    except SafetensorError as error:
        raise bad_input(f"{path} cannot be read: {error}") from error


def _shorten(config: Any, model: Any) -> None:
    """Let a configuration name layers as they are called without the output layer."""
    prefix = f"{model.base_model_prefix}."
    if hasattr(model, model.base_model_prefix):
        return
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name, None)
        if isinstance(value, list | set | tuple):
            setattr(config, name, type(value)(one.removeprefix(prefix) for one in value))
    for name in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, name, None)
        if isinstance(value, Mapping):
            setattr(config, name, {key.removeprefix(prefix): one for key, one in value.items()})


def _has_prefix(folder: Path, model: Any) -> bool:
    """Whether an adapter was made for the model with its output layer."""
    prefix = f"{_BASE}{model.base_model_prefix}."
    return not hasattr(model, model.base_model_prefix) and any(name.startswith(prefix) for name in _names(folder))


def _in_model(key: str, model: Any, *, headless: bool) -> str:
    """Return what a weight of an adapter would be called in the model."""
    name = key.removeprefix(_BASE)
    own = model.base_model_prefix
    return name.removeprefix(f"{own}.") if headless and not hasattr(model, own) else name


def _of_head(key: str, model: Any) -> bool:
    """Whether a weight belongs to the output layer, which a model without it does not need."""
    return not hasattr(model, key.removeprefix(_BASE).partition(".")[0])


def _such_as(keys: list[str]) -> str:
    return f" ({keys[0]})" if keys else ""
