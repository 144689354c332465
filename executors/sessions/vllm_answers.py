"""Answers of a vLLM session: each prompt of a request is a generation of its own, and they are told as they come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executors.base import write_responses
from executors.data.sources import read_entries
from executors.generation.answers import result_of
from executors.generation.meter import Meter
from executors.generation.prompts import Prompt, encoded, read_prompts, render
from executors.modeling.loading import load_tokenizer
from executors.modeling.location import Location
from executors.sessions.adapters import adapters_of
from executors.sessions.engine import together
from executors.sessions.vllm_arguments import sampling_params
from executors.sessions.vllm_logprobs import generated, of_prompt
from gpuflow.protocol import Emitter, Request


@dataclass(kw_only=True)
class _Sample:
    """One answer as its parts arrive."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that has been read: prompts, their tokens, vLLM's parameters and adapter."""

    request: Request
    emitter: Emitter
    prompts: Sequence[Prompt]
    tokens: Sequence[list[int]]
    params: Any
    lora: Any
    stream: bool
    at_once: int
    meter: Meter
    items: dict[int, dict[str, Any]] = field(default_factory=dict)


class Answers:
    """Asks one AsyncLLM. `engine` names adapters and says how much it does at once."""

    def __init__(self, llm: Any, location: Location, engine: Any) -> None:
        self._llm = llm
        self._engine = engine
        self._name = location.name
        self._tokenizer = load_tokenizer(location, padding_side="left")
        self._numbers = itertools.count(1)

    async def run(self, asked: Asked) -> dict[str, Any]:
        """Answer all prompts of a request, write the answers and return the result value."""
        asked.emitter.status("working")
        places = asyncio.Semaphore(asked.at_once)
        await together(self._answer(index, asked, places) for index in range(len(asked.prompts)))
        items = [asked.items[index] for index in sorted(asked.items)]
        result = result_of(items, self._name, "vllm", inference=asked.request.spec.get("inference"))
        await asyncio.to_thread(write_responses, asked.request, asked.emitter, result)
        return result

    def read(self, request: Request, emitter: Emitter) -> Asked:
        """Read a request; in a thread. Raises ExecutorError: BadInput."""
        inference: Mapping[str, Any] = request.spec.get("inference") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        stream = bool(inference.get("stream"))
        params = sampling_params(inference, stream=stream)
        prompts = read_prompts(read_entries(data, request.cache_dir, emitter), data)
        return Asked(
            request=request,
            emitter=emitter,
            prompts=prompts,
            tokens=encoded([render(prompt, self._tokenizer, inference) for prompt in prompts], self._tokenizer),
            params=params,
            lora=self._engine.lora_request(adapters_of(request)),
            stream=stream,
            at_once=int(inference.get("batch_size") or self._engine.max_requests),
            meter=Meter(),
        )

    async def _answer(self, index: int, asked: Asked, places: asyncio.Semaphore) -> None:
        prompt, tokens = asked.prompts[index], asked.tokens[index]
        samples = [_Sample() for _ in range(asked.params.n)]
        prompt_logprobs: Any = None
        async with places:
            answers = self._llm.generate(
                {"prompt_token_ids": tokens},
                asked.params.clone(),
                f"{asked.request.task_id}-{next(self._numbers)}",
                lora_request=asked.lora,
            )
            async for answer in answers:
                prompt_logprobs = prompt_logprobs or answer.prompt_logprobs
                for output in answer.outputs:
                    _add_output(samples[output.index], output)
                    if asked.stream and output.text:
                        extra = {"sample": output.index} if len(samples) > 1 else {}
                        asked.emitter.emit("text_delta", delta=output.text, request=prompt.index, **extra)
        asked.items[index] = _item(prompt, len(tokens), samples, prompt_logprobs)
        asked.meter.tokens += sum(sample.tokens for sample in samples)
        done, total = len(asked.items), len(asked.prompts)
        if done == total or asked.meter.due():
            asked.emitter.progress(done, total, "item", tokens_per_second=asked.meter.tokens_per_second())


def _add_output(sample: _Sample, output: Any) -> None:
    sample.text += output.text
    sample.tokens += len(output.token_ids)
    sample.finish_reason = output.finish_reason or sample.finish_reason
    if output.logprobs:
        sample.logprobs += generated(output.token_ids, output.logprobs)


def _item(prompt: Prompt, prompt_tokens: int, samples: Sequence[_Sample], prompt_logprobs: Any) -> dict[str, Any]:
    item: dict[str, Any] = {
        "index": prompt.index,
        **prompt.shown,
        "output": samples[0].text,
        "finish_reason": samples[0].finish_reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": sum(sample.tokens for sample in samples)},
    }
    if len(samples) > 1:
        item["outputs"] = [sample.text for sample in samples]
        item["finish_reasons"] = [sample.finish_reason for sample in samples]
    if any(sample.logprobs for sample in samples):
        item["logprobs"] = samples[0].logprobs if len(samples) == 1 else [sample.logprobs for sample in samples]
    if prompt_logprobs:
        item["prompt_logprobs"] = of_prompt(prompt_logprobs)
    return item
