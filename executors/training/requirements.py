"""Refuses, before data or a model is loaded, what a training asks for and this machine or environment lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from executors.base import ExecutorError, bad_input
from gpuflow.protocol import Request

#: `training.report_to` -> the modules of which one must be there.
_TRACKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


def trackers_of(training: Mapping[str, Any]) -> list[str]:
    """Return the names in `training.report_to`; none for `none`."""
    given = training.get("report_to")
    names = given if isinstance(given, list) else [given]
    return [str(name) for name in names if name and name != "none"]


def quantised(request: Request) -> bool:
    """Say whether the model is to be loaded with quantised weights."""
    options = _loading_options(request)
    return bool(options.get("quantization_config") or options.get("load_in_4bit") or options.get("load_in_8bit"))


def _loading_options(request: Request) -> dict[str, Any]:
    training: Mapping[str, Any] = request.spec.get("training") or {}
    model: Mapping[str, Any] = request.spec.get("model") or {}
    return {**(training.get("model_init_kwargs") or {}), **(model.get("transformers") or {})}


def check_requirements(request: Request) -> None:
    """Raise ExecutorError, MissingDependency or BadInput, for what cannot work here."""
    training: Mapping[str, Any] = request.spec.get("training") or {}
    for name in trackers_of(training):
        modules = _TRACKERS.get(name, ())
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            raise ExecutorError(
                "MissingDependency",
                f"training.report_to: {modules[0]} is not installed in the environment of this task; run "
                "`pip install 'gpuflow[tracking]'` beside the worker, or leave report_to out",
            )
    if training.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise ExecutorError(
            "MissingDependency",
            "training.deepspeed: deepspeed is not installed in the environment of this task; run "
            "`pip install deepspeed` beside the worker, or write training.fsdp: full_shard auto_wrap in its place",
        )
    if training.get("use_vllm"):
        raise bad_input(
            "training.use_vllm: the environment of the trainers has no vLLM, which needs another transformers; leave "
            "it out"
        )
    is_lora = request.task_type == "lora_sft" or request.spec.get("lora") is not None
    if training.get("merge_adapter") and not is_lora:
        raise bad_input("training.merge_adapter: there is no adapter to merge; add the section lora, or leave it out")
    if quantised(request):
        _check_quantised(training, is_lora=is_lora)


def _check_quantised(training: Mapping[str, Any], *, is_lora: bool) -> None:
    if not is_lora:
        raise bad_input("model.transformers: quantised weights cannot be trained; add the section lora")
    if training.get("merge_adapter"):
        raise bad_input(
            "training.merge_adapter: an adapter cannot be merged into quantised weights without loss; leave it out, "
            "and load the adapter on the model"
        )
    import torch

    if not torch.cuda.is_available():
        raise bad_input(
            "model.transformers: quantised loading needs a GPU, and this task has none; ask for one by "
            "resources.accelerators, or leave quantization_config out"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ExecutorError(
            "MissingDependency",
            "model.transformers: quantised loading needs bitsandbytes, which is not installed in the environment of "
            "this task; run `pip install bitsandbytes` beside the worker",
        )
