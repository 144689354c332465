"""From the sections `training` and `lora` to the configurations of TRL and PEFT, with defaults for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from executors.base import bad_input

if TYPE_CHECKING:
    from peft import LoraConfig

#: Fields of a template's `training` that are ours, not the trainer's.
OWN: Final = frozenset(
    {
        "allow_multi_gpu",
        "nproc_per_node",
        "save_model",
        "merge_adapter",
        "allow_non_finite_loss",
        "max_prompt_length",
    }
)
#: Up to so many steps, every one is logged.
_LOG_EVERY_STEP: Final = 200
#: Checkpoints that are kept of a training that saves by the clock.
_KEPT_BY_CLOCK: Final = 2


def saves_by_clock(training: Mapping[str, Any]) -> bool:
    """Say whether the user leaves it to us when checkpoints are saved: then that is every few minutes."""
    return not any(name in training for name in ("save_strategy", "save_steps", "load_best_model_at_end"))


def allows_non_finite_loss(training: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Say whether a training goes on with losses that are no numbers, and return what to warn of.

    TRL's `logging_nan_inf_filter: true` asks for that too, where `allow_non_finite_loss` is not given.
    """
    allowed = training.get("allow_non_finite_loss")
    if allowed is not None:
        return bool(allowed), []
    if not training.get("logging_nan_inf_filter"):
        return False, []
    return True, [
        "training.logging_nan_inf_filter is taken as allow_non_finite_loss: a loss that is no number does not end the "
        "training, and the filter hides it; write allow_non_finite_loss: true to see it"
    ]


def trainer_arguments(
    config: type[Any],
    training: Mapping[str, Any],
    output_dir: str,
    *,
    has_eval: bool,
    defaults: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Return the configuration of a training, an instance of `config`; the user's fields win over every default.

    `defaults` are those of the task type, `extra` values of ours that win over the user's. Raises ExecutorError:
    BadInput with the trainer's own words.
    """
    import torch

    given = {name: value for name, value in training.items() if name not in OWN and name != "model_init_kwargs"}
    if not has_eval and given.get("eval_strategy", "no") != "no":
        raise bad_input("training.eval_strategy needs data to evaluate on; set data.eval_split, as in 0.1")
    if given.get("report_to", "") is None:
        del given["report_to"]  # transformers looks for a reporter of that name
    usual = {**_defaults(given, cuda=torch.cuda.is_available()), **(defaults or {})}
    try:
        return config(**{**usual, **given, **(extra or {}), "output_dir": output_dir})
    except (TypeError, ValueError) as error:
        raise bad_input(f"training: {error}") from error


def _defaults(given: Mapping[str, Any], *, cuda: bool) -> dict[str, Any]:
    import torch

    steps = given.get("max_steps") or 0
    defaults: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1 if 0 < steps <= _LOG_EVERY_STEP else 10,
        "logging_first_step": True,
        # A loss that is no number is not hidden behind the mean of the others: it fails the training (`Progress`).
        "logging_nan_inf_filter": False,
        "save_strategy": "no" if saves_by_clock(given) else "steps",
    }
    if saves_by_clock(given):
        defaults["save_total_limit"] = _KEPT_BY_CLOCK
    if not given.get("bf16") and not given.get("fp16"):
        defaults["bf16"] = cuda and torch.cuda.is_bf16_supported()
    # Activation checkpointing trades time for GPU memory; a CPU has the memory.
    defaults["activation_checkpointing"] = given.get("gradient_checkpointing", cuda)
    if not cuda:
        defaults |= {"use_cpu": True, "dataloader_pin_memory": False}
    return defaults


def lora_config(lora: Mapping[str, Any] | None, *, kind: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM") -> LoraConfig:
    """Return the configuration of the adapter; PEFT's defaults for what the user left out.

    But all linear layers are tuned where no target is named: PEFT's own choice, two projections of the attention,
    learns less than a full training does (Schulman et al., LoRA Without Regret, 2025). Raises ExecutorError: BadInput.
    """
    from peft import LoraConfig

    fields = {"task_type": kind, **(lora or {})}
    if not fields.get("target_modules") and not fields.get("target_parameters"):
        fields["target_modules"] = "all-linear"
    try:
        return LoraConfig(**fields)
    except (TypeError, ValueError) as error:
        raise bad_input(f"lora: {error}") from error
