"""From the canonical spec to vLLM's own arguments: engine and sampling. Pure; imports vLLM late, for its classes alone.

Names are those of the shipped schemas, so what a client accepted is what the engine gets; one that this vLLM does not
have is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from executors.base import bad_input
from executors.generation.parameters import DEFAULT_MAX_TOKENS
from gpuflow.spec.engines import TRANSFORMERS_ALONE
from gpuflow.spec.fields import load_schema
from gpuflow.spec.sections import ENGINE, INFERENCE

#: Rank that there is room for where the task does not say: it must not depend on whose adapter came first.
_RANK: Final = 64
#: Adapters that may act in one batch, where the task does not say.
_ADAPTERS_AT_ONCE: Final = 4
_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
#: Fields of `inference` that say nothing to vLLM's sampling.
_OWN: Final = frozenset(INFERENCE.own) - TRANSFORMERS_ALONE


def engine_arguments(given: Mapping[str, Any] | None, gpus: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Return the arguments of the engine that `model.vllm` gives, and those that follow from the GPUs.

    `known` are the names that this vLLM has. Raises ExecutorError: BadInput naming one that it has not.
    """
    arguments = {name: value for name, value in (given or {}).items() if value is not None}
    for name in arguments:
        if name in ENGINE.managed:
            raise bad_input(f"model.vllm.{name} is set by gpuflow; {ENGINE.managed[name]}")
        if name not in known:
            raise bad_input(f"model.vllm.{name} is no argument of vLLM's engine{_near(name, known)}")
    if gpus and not any(name in arguments for name in _PARALLEL):
        arguments["tensor_parallel_size"] = len(gpus)
    arguments.setdefault("disable_log_stats", True)
    return arguments


def lora_arguments(arguments: Mapping[str, Any], *, adapted: bool) -> dict[str, Any]:
    """Return what makes room for adapters; nothing where none will come (`adapted`) and none is asked for."""
    if not adapted and not arguments.get("enable_lora"):
        return {}
    own = {"enable_lora": True, "max_lora_rank": _RANK, "max_loras": _ADAPTERS_AT_ONCE}
    return {name: value for name, value in own.items() if arguments.get(name) is None}


def memory_arguments(arguments: Mapping[str, Any], share_mib: int | None, total_mib: int | None) -> dict[str, Any]:
    """Return what keeps the engine within its share of each GPU, which has `total_mib`; nothing without a share.

    Raises ExecutorError: BadInput where `model.vllm` asks for more than the share.
    """
    if share_mib is None or not total_mib:
        return {}
    share = min(1.0, math.floor(share_mib / total_mib * 10_000) / 10_000)
    own = f"{share_mib} of the {total_mib} MiB of its GPU; leave it out, or ask for more memory in resources"
    asked = arguments.get("gpu_memory_utilization")
    if asked is not None and float(asked) > share:
        raise bad_input(f"model.vllm.gpu_memory_utilization is {asked}, but the task has {share:g}: {own}")
    cache = arguments.get("kv_cache_memory_bytes")
    if isinstance(cache, int) and cache > share_mib << 20:
        raise bad_input(f"model.vllm.kv_cache_memory_bytes is {cache}, but the task has {own}")
    return {} if asked is not None else {"gpu_memory_utilization": share}


def sampling_arguments(inference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of SamplingParams that an `inference` section gives.

    Raises ExecutorError: BadInput for a name that is not in the shipped schema.
    """
    schema = load_schema(INFERENCE.schema)
    given = {name: value for name, value in (inference or {}).items() if value is not None and name not in _OWN}
    for name in given:
        if name in INFERENCE.managed:
            raise bad_input(f"inference.{name} is set by gpuflow; {INFERENCE.managed[name]}")
        if name in TRANSFORMERS_ALONE:
            raise bad_input(f"inference.{name} is of the transformers engine alone; write engine: transformers")
        if name not in schema:
            raise bad_input(f"inference.{name} is no sampling parameter of vLLM{_near(name, schema)}")
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = {_token(key): value for key, value in given["logit_bias"].items()}
    return given


def sampling_params(inference: Mapping[str, Any] | None, *, stream: bool) -> Any:
    """Return vLLM's SamplingParams. Raises ExecutorError: BadInput for what vLLM refuses."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = sampling_arguments(inference)
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    try:
        if arguments.get("structured_outputs") is not None:
            arguments["structured_outputs"] = _structured(arguments["structured_outputs"])
        return SamplingParams(**arguments, output_kind=kind)
    except (ValueError, TypeError) as error:
        raise bad_input(f"inference does not fit vLLM's SamplingParams: {error}") from error
    except Exception as error:
        from vllm.exceptions import VLLMClientError

        if isinstance(error, VLLMClientError):
            raise bad_input(f"inference does not fit vLLM's SamplingParams: {error}") from error
        raise


def _structured(given: Any) -> Any:
    from dataclasses import fields

    from vllm.sampling_params import StructuredOutputsParams

    if not isinstance(given, Mapping):
        raise bad_input("inference.structured_outputs must be an object: json, regex, choice or grammar")
    known = [field.name for field in fields(StructuredOutputsParams) if not field.name.startswith("_")]
    for name in given:
        if name not in known:
            raise bad_input(f"inference.structured_outputs.{name} is unknown to vLLM{_near(name, known)}")
    return StructuredOutputsParams(**given)


def _token(key: Any) -> int:
    try:
        return int(key)
    except ValueError:
        raise bad_input(f"inference.logit_bias has the key {key!r}; keys are token ids") from None


def _near(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
