"""What `inference` asks of an engine: fields that one engine has alone choose it, and are refused with the other. Pure.

Used by `normalise` and `checking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Findings
from gpuflow.spec.structured import needs_vllm

#: Fields of `inference` that the transformers engine has and vLLM has not.
TRANSFORMERS_ALONE: Final = frozenset({"no_repeat_ngram_size"})
#: Fields of `inference` that vLLM has and the transformers engine has not.
VLLM_ALONE: Final = frozenset(
    {
        "allowed_token_ids", "bad_words", "extra_args", "flat_logprobs", "logit_bias", "logprob_token_ids", "logprobs",
        "prompt_logprob_start", "prompt_logprob_token_ids", "prompt_logprobs", "repetition_detection",
        "routed_experts_prompt_start", "skip_reading_prefix_cache", "stream_interval", "thinking_token_budget",
        "trace_decode_token_ids", "watermarking",
    }
)  # fmt: skip
_WITH_ENGINES: Final = ("inference", "rag")


def chooses_engine(spec: Mapping[str, Any]) -> bool:
    """Say whether a field of `inference` chooses the engine."""
    section = spec.get("inference")
    return isinstance(section, Mapping) and any(_wanted(section).values())


def _wanted(section: Mapping[str, Any]) -> dict[str, list[str]]:
    """Engine -> what is asked for that it has alone, and that changes the answer so much that nobody can do without."""
    return {
        "transformers": sorted(name for name in TRANSFORMERS_ALONE if section.get(name) is not None),
        "vllm": [
            *(f"structured_outputs.{name}" for name in needs_vllm(section.get("structured_outputs"))),
            *sorted(name for name in VLLM_ALONE if asks(section.get(name))),
        ],
    }


def asks(value: Any) -> bool:
    """Say whether a field of `inference` asks for something; null, false and what is empty do not."""
    return value is not None and value is not False and value not in ([], {})


def choose_engine(spec: dict[str, Any], findings: Findings) -> None:
    """Let a field of `inference` that one engine has alone choose the engine, where the spec names none.

    Where it names the other one, that is a mistake: the task would fail once it has its GPU.
    """
    section = spec.get("inference")
    if spec.get("taskType") not in _WITH_ENGINES or not isinstance(section, dict):
        return
    named = {engine: names for engine, names in _wanted(section).items() if names}
    if len(named) > 1:
        (_, first), (other, names) = named.items()
        findings.add(
            ("inference", *first[0].split(".")),
            f"and inference.{names[0]} have no engine in common ({other} has the latter); keep one",
        )
        return
    for engine, names in named.items():
        given = spec.get("engine")
        if spec["taskType"] == "rag" and engine != "transformers":
            findings.add(
                ("inference", *names[0].split(".")), f"is of the {engine} engine alone, and rag answers by transformers"
            )
            continue
        if given in (None, "auto"):
            if spec.get("environment") is None and spec["taskType"] == "inference":
                spec["engine"] = engine
        elif given != engine:
            findings.add(
                ("inference", *names[0].split(".")),
                f"is of the {engine} engine alone, but engine is {given}; leave out one of them",
            )
