"""Sane bounds of numbers in training, lora, inference and model.vllm. Used by `fields` alone.

The libraries accept absurd values and fail hours later; these bounds catch slips of the keyboard, not tastes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MANY: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A closed range, its lower end open if `above` is set; values in `also` are signs of their own."""

    low: float
    high: float = _MANY
    above: bool = False
    below: bool = False
    also: tuple[float, ...] = ()

    def mistake(self, value: float) -> str | None:
        """Return what is wrong with `value`, or None."""
        low_ok = value > self.low if self.above else value >= self.low
        high_ok = value < self.high if self.below else value <= self.high
        if (low_ok and high_ok) or value in self.also:
            return None
        low = f"{'above' if self.above else 'from'} {self.low:g}"
        high = f"{'below' if self.below else 'to'} {self.high:g}"
        also = f", or {', '.join(f'{v:g}' for v in self.also)}" if self.also else ""
        return f"must be {low} {high}{also}"


_COUNT: Final = Bound(low=1)
_COUNT_OR_ZERO: Final = Bound(low=0)
_SHARE: Final = Bound(low=0, high=1)
_POSITIVE_SHARE: Final = Bound(low=0, high=1, above=True)
_BATCH: Final = Bound(low=1, high=65536)
_TOKENS: Final = Bound(low=1, high=10_000_000)
_PROCESSES: Final = Bound(low=1, high=1024)
_BETA: Final = Bound(low=0, high=1, below=True)
_PENALTY: Final = Bound(low=-2, high=2)

TRAINING: Final[dict[str, Bound]] = {
    "learning_rate": Bound(low=0, high=10, above=True),
    "num_train_epochs": Bound(low=0, high=100_000, above=True),
    "max_steps": Bound(low=1, also=(-1,)),
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": _BATCH,
    "gradient_accumulation_steps": Bound(low=1, high=1_000_000),
    "eval_accumulation_steps": _COUNT,
    "weight_decay": Bound(low=0, high=10),
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": Bound(low=0, high=1),
    "max_grad_norm": Bound(low=0, high=1e6),
    "warmup_steps": _COUNT_OR_ZERO,
    "logging_steps": Bound(low=0, above=True),
    "save_steps": Bound(low=0, above=True),
    "eval_steps": Bound(low=0, above=True),
    "eval_delay": _COUNT_OR_ZERO,
    "save_total_limit": Bound(low=1, high=100_000),
    "dataloader_num_workers": Bound(low=0, high=1024),
    "dataset_num_proc": _PROCESSES,
    "label_smoothing_factor": _SHARE,
    "label_smoothing": Bound(low=0, high=0.5, below=True),
    "neftune_noise_alpha": Bound(low=0, high=1000),
    "seed": Bound(low=0, high=2**32 - 1),
    "data_seed": Bound(low=0, high=2**32 - 1),
    "ddp_timeout": _COUNT,
    "max_length": _TOKENS,
    "max_completion_length": _TOKENS,
    "max_prompt_length": _TOKENS,
    "response_length": _TOKENS,
    "num_generations": Bound(low=1, high=4096),
    "num_iterations": Bound(low=1, high=10_000),
    "num_ppo_epochs": Bound(low=1, high=10_000),
    "num_mini_batches": Bound(low=1, high=65536),
    "total_episodes": _COUNT,
    "beta": Bound(low=0, high=1000),
    "epsilon": Bound(low=0, high=100),
    "kl_coef": Bound(low=0, high=1000),
    "cliprange": Bound(low=0, high=100),
    "cliprange_value": Bound(low=0, high=100),
    "gamma": _SHARE,
    "lam": _SHARE,
    "temperature": Bound(low=0, high=100),
    "top_p": _POSITIVE_SHARE,
    "min_p": _SHARE,
    "nproc_per_node": _PROCESSES,
    "vllm_gpu_memory_utilization": _POSITIVE_SHARE,
    "vllm_tensor_parallel_size": _PROCESSES,
}

LORA: Final[dict[str, Bound]] = {
    "r": Bound(low=1, high=65536),
    "lora_alpha": Bound(low=0, high=1_000_000, above=True),
    "lora_dropout": _BETA,
    "qalora_group_size": _COUNT,
}

SAMPLING: Final[dict[str, Bound]] = {
    "max_tokens": _TOKENS,
    "min_tokens": Bound(low=0, high=10_000_000),
    "temperature": Bound(low=0, high=100),
    "top_p": _POSITIVE_SHARE,
    "top_k": Bound(low=0, high=10_000_000, also=(-1,)),
    "min_p": _SHARE,
    "n": Bound(low=1, high=1024),
    "no_repeat_ngram_size": Bound(low=0, high=10_000),
    "seed": Bound(low=0, high=2**63 - 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Bound(low=0, high=100, above=True),
    "logprobs": Bound(low=0, high=1_000_000, also=(-1,)),
    "prompt_logprobs": Bound(low=0, high=1_000_000, also=(-1,)),
    "thinking_token_budget": Bound(low=0, high=10_000_000),
    "batch_size": _BATCH,
}

ENGINE: Final[dict[str, Bound]] = {
    "tensor_parallel_size": _PROCESSES,
    "pipeline_parallel_size": _PROCESSES,
    "data_parallel_size": _PROCESSES,
    "gpu_memory_utilization": _POSITIVE_SHARE,
    "max_model_len": Bound(low=1, high=100_000_000, also=(-1,)),
    "max_num_seqs": Bound(low=1, high=1_000_000),
    "max_num_batched_tokens": Bound(low=1, high=100_000_000),
    "cpu_offload_gb": Bound(low=0, high=1_000_000),
    "kv_cache_memory_bytes": Bound(low=1, high=2**50),
    "block_size": Bound(low=1, high=65536),
    "max_loras": Bound(low=1, high=100_000),
    "max_cpu_loras": Bound(low=1, high=100_000),
    "seed": Bound(low=0, high=2**63 - 1),
    "max_logprobs": Bound(low=0, high=1_000_000, also=(-1,)),
}
