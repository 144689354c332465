"""Sampling parameters: from the `inference` section, in SamplingParams' names, to what generation needs. Pure.

What the transformers engine cannot do is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from executors.base import bad_input
from gpuflow.spec.engines import asks
from gpuflow.spec.report import path_text
from gpuflow.spec.structured import needs_vllm, wrong_structure

#: Most new tokens of an answer where the task names no max_tokens.
DEFAULT_MAX_TOKENS: Final = 256

_OWN: Final = frozenset(
    {
        "system_prompt", "stream", "batch_size", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    }
)  # fmt: skip
_SAMPLING: Final = frozenset(
    {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
        "include_stop_str_in_output", "ignore_eos", "n", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "skip_special_tokens", "no_repeat_ngram_size", "structured_outputs",
    }
)  # fmt: skip
#: Fields of vLLM's detokenizer that change nothing here.
_HARMLESS: Final = frozenset({"detokenize", "spaces_between_special_tokens", "skip_clone", "output_text_buffer_length"})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 cut nothing."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = True
    #: No sequence of so many tokens comes twice in an answer and its prompt; 0: any may.
    no_repeat_ngram_size: int = 0
    #: What the answer has to be, as JSON text of `structured_outputs`.
    structured: str | None = None

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature == 0

    def generate_arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` that choose tokens."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "do_sample": not self.greedy,
            "num_return_sequences": self.n,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.min_tokens:
            arguments["min_new_tokens"] = self.min_tokens
        if self.no_repeat_ngram_size:
            arguments["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        if not self.greedy:
            arguments |= {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": max(self.top_k, 0),
                "min_p": self.min_p or None,
            }
        return arguments


def read_sampling(inference: Mapping[str, Any] | None) -> Sampling:
    """Return the sampling parameters of an `inference` section.

    Raises ExecutorError: BadInput for a parameter that the transformers engine does not have, or a value out of range.
    """
    given = {name: value for name, value in (inference or {}).items() if value is not None}
    unknown = sorted(name for name in set(given) - _OWN - _SAMPLING - _HARMLESS if asks(given[name]))
    if unknown:
        raise bad_input(
            f"inference.{unknown[0]} is not supported by the transformers engine; leave it out "
            f"(it has: {', '.join(sorted(_SAMPLING))})"
        )
    chosen = {name: value for name, value in given.items() if name in _SAMPLING}
    if "structured_outputs" in chosen:
        chosen["structured"] = _structured(chosen.pop("structured_outputs"))
    if "stop" in chosen:
        stop = chosen["stop"]
        chosen["stop"] = tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)
    if "stop_token_ids" in chosen:
        chosen["stop_token_ids"] = tuple(chosen["stop_token_ids"])
    sampling = Sampling(**chosen)
    _check(sampling)
    return sampling


def _structured(given: Any) -> str:
    for path, message in wrong_structure(given):
        raise bad_input(f"{path_text(('inference', 'structured_outputs', *path))} {message}")
    if names := needs_vllm(given):
        raise bad_input(
            f"inference.structured_outputs.{names[0]} needs the engine vllm, and this is the transformers engine; set "
            "engine: vllm (`gpuflow env create vllm` on the worker), or use json, regex or choice"
        )
    return json.dumps(given, sort_keys=False)


def _check(sampling: Sampling) -> None:
    limits: tuple[tuple[str, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "between 0 and max_tokens"),
        ("temperature", sampling.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= -1, "0 or -1 (all), or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "between 0 and 1"),
        ("n", sampling.n >= 1, "at least 1"),
        ("no_repeat_ngram_size", sampling.no_repeat_ngram_size >= 0, "0 (any may repeat), or more"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "above 0"),
    )
    for name, fits, rule in limits:
        if not fits:
            raise bad_input(f"inference.{name} is {getattr(sampling, name)!r}; it must be {rule}")
    if sampling.n > 1 and sampling.greedy:
        raise bad_input(f"inference.n is {sampling.n} with temperature 0: all answers would be equal; use n: 1")
