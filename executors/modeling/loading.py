"""Loads a model and its tokenizer for a task: precision, device, adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executors.base import bad_input
from executors.modeling.adapter_config import judge_adapter
from executors.modeling.location import (
    Location,
    adapter_base,
    adapter_folder,
    local,
    resolve,
    weights_folder,
)
from gpuflow.protocol import Emitter, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def locate(request: Request, emitter: Emitter) -> tuple[Location, list[dict[str, Any]]]:
    """Return the base model of a request and its adapters `{path, weight}`, in order.

    `checkpoint_path` replaces the model if it is a model folder, and is the first adapter if it is an adapter.
    """
    model = request.spec.get("model") or {}
    adapters = [dict(adapter) for adapter in model.get("adapters") or ()]
    for adapter in adapters:
        if not adapter.get("path"):
            raise bad_input("an adapter of model.adapters has no path; give the folder of a LoRA adapter")
        folder = adapter_folder(adapter["path"])
        if folder is None:
            raise bad_input(f"{adapter['path']} holds no LoRA adapter: there is no adapter_config.json in it")
        adapter["path"] = str(folder)
    if not request.checkpoint_path:
        return resolve(model, request.cache_dir, emitter), adapters
    folder = adapter_folder(request.checkpoint_path)
    if folder is None:
        place = local(weights_folder(request.checkpoint_path), name=(model.get("source") or {}).get("identifier"))
        return place, adapters
    if not (model.get("source") or {}).get("identifier"):
        model = {"source": {"identifier": adapter_base(folder)}}
    return resolve(model, request.cache_dir, emitter), [{"path": str(folder)}, *adapters]


def load_tokenizer(location: Location, *, padding_side: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer; one without a pad token pads with its end token."""
    options = {key: value for key, value in location.options.items() if value is not None}
    tokenizer = AutoTokenizer.from_pretrained(location.place, **options)
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise bad_input(f"the tokenizer of {location.name} has neither a pad nor an end token; set one in it")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(location: Location, options: Mapping[str, Any], kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Load the weights with arguments of from_pretrained; to the first GPU, if there is one and no device_map.

    `kind` is the class of transformers that loads them: a language model, unless it is said.
    """
    arguments = {**location.options, **options}
    if "torch_dtype" in arguments:
        arguments.setdefault("dtype", arguments.pop("torch_dtype"))
    arguments["dtype"] = _dtype(arguments.get("dtype", "auto"))
    model: PreTrainedModel = kind.from_pretrained(location.place, **arguments)
    if torch.cuda.is_available() and "device_map" not in arguments and getattr(model, "hf_quantizer", None) is None:
        model = model.to("cuda")
    return model


def _dtype(wanted: Any) -> Any:
    if not isinstance(wanted, str) or wanted == "auto":
        return wanted
    found = getattr(torch, wanted.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise bad_input(f"model.transformers.dtype is {wanted!r}; use auto, float32, bfloat16 or float16")
    return found


def apply_adapters(model: PreTrainedModel, adapters: Sequence[Mapping[str, Any]]) -> PreTrainedModel:
    """Put LoRA adapters on a model; several, or one with a weight, act as their weighted sum."""
    if not adapters:
        return model
    from peft import PeftModel

    for adapter in adapters:
        judge_adapter(Path(adapter["path"]))
    names = [f"adapter_{index}" for index in range(len(adapters))]
    tuned = PeftModel.from_pretrained(model, adapters[0]["path"], adapter_name=names[0])
    for name, adapter in zip(names[1:], adapters[1:], strict=True):
        tuned.load_adapter(adapter["path"], adapter_name=name)
    weights = [1.0 if adapter.get("weight") is None else float(adapter["weight"]) for adapter in adapters]
    if len(names) > 1 or weights != [1.0]:
        tuned.add_weighted_adapter(names, weights, "sum", combination_type="cat")
        tuned.set_adapter("sum")
    return tuned


def merged(model: PreTrainedModel, adapters: Sequence[Mapping[str, Any]]) -> PreTrainedModel:
    """Return a model whose own weights contain the adapters, to train on from there."""
    return apply_adapters(model, adapters).merge_and_unload() if adapters else model
