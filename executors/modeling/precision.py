"""Which precision a model is loaded in, where the task does not say."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from executors.modeling.location import Location


def computes_bfloat16() -> bool:
    """Whether this machine has instructions for bfloat16; without them a CPU is many times slower in it."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in tests)


def inference_options(location: Location) -> dict[str, Any]:
    """Return the preset's arguments of from_pretrained, with float32 in place of a bfloat16 that would be slow."""
    options = dict(location.inference)
    if options.get("dtype") == "bfloat16" and not computes_bfloat16():
        options["dtype"] = "float32"
    return options


def training_dtype(location: Location, *, is_lora: bool, bf16: bool) -> str:
    """Return the precision of the weights while training.

    Weights that are trained are float32. The frozen ones under a LoRA adapter are bfloat16 where the training computes
    in it (`bf16`), or where they are stored so and the machine is fast in it.
    """
    if not is_lora:
        return "float32"
    if bf16:
        return "bfloat16"
    config = AutoConfig.from_pretrained(location.place, **location.options)
    stored = getattr(config, "dtype", None)
    return "bfloat16" if stored in (torch.bfloat16, "bfloat16") and computes_bfloat16() else "float32"
