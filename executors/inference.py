"""The task type `inference`: answers prompts with a transformers model, in batches, and writes responses.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from executors.base import Executor, write_responses
from executors.data.sources import read_entries
from executors.generation.parameters import Sampling, read_sampling
from executors.generation.prompts import Prompt, read_prompts, render
from executors.modeling.libraries import prepare_libraries
from gpuflow.protocol import Emitter, Request


class Inference(Executor):
    """Answers every prompt of `data`; the result holds items (input, output, finish_reason), usage, model, engine."""

    task_types: ClassVar[tuple[str, ...]] = ("inference",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Check the request, load the model, generate batch by batch, write the answers and return them."""
        inference: Mapping[str, Any] = request.spec.get("inference") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        sampling = read_sampling(inference)
        prompts = read_prompts(read_entries(data, request.cache_dir, emitter), data)
        if (request.spec.get("model") or {}).get("vllm"):
            emitter.emit("log", message="model.vllm is not used: this task runs on the transformers engine")
        prepare_libraries()
        engine, tokenizer, name = _load(request, sampling, emitter)
        emitter.status("working")
        items, usage = _answer_all(prompts, engine, tokenizer, inference, sampling, emitter)
        result = {"items": items, "usage": usage, "model": name, "engine": "transformers"}
        write_responses(request, emitter, result)
        return result


def _load(request: Request, sampling: Sampling, emitter: Emitter) -> tuple[Any, Any, str]:
    emitter.status("loading", "loading the model")
    import torch

    from executors.generation.engine import Engine
    from executors.modeling.loading import apply_adapters, load_model, load_tokenizer, locate
    from executors.modeling.precision import inference_options

    location, adapters = locate(request, emitter)
    tokenizer = load_tokenizer(location, padding_side="left")
    options = {**inference_options(location), **((request.spec.get("model") or {}).get("transformers") or {})}
    if torch.cuda.device_count() > 1:
        options.setdefault("device_map", "auto")
    model = apply_adapters(load_model(location, options), adapters)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    return Engine(model, tokenizer, sampling), tokenizer, location.name


def _answer_all(
    prompts: Sequence[Prompt],
    engine: Any,
    tokenizer: Any,
    inference: Mapping[str, Any],
    sampling: Sampling,
    emitter: Emitter,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    from executors.generation.engine import Meter

    meter = Meter()
    size = max(1, int(inference.get("batch_size") or _default_batch()) // sampling.n)
    stream = bool(inference.get("stream"))
    items: list[dict[str, Any]] = []
    prompt_tokens = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        texts = [render(prompt, tokenizer, inference) for prompt in batch]

        def watch(rows: Sequence[Any], batch: Sequence[Prompt] = batch, start: int = start) -> None:
            if stream:
                _tell_deltas(rows, batch, sampling.n, emitter)
            if meter.due():
                speed = meter.tokens_per_second(sum(row.tokens for row in rows))
                emitter.progress(start, len(prompts), "item", tokens_per_second=speed)

        for prompt, text, rows in zip(batch, texts, engine.answer(texts, watch), strict=True):
            counted = engine.count_tokens(text)
            prompt_tokens += counted
            meter.tokens += sum(row.tokens for row in rows)
            items.append(_item(prompt, rows, counted))
        emitter.progress(len(items), len(prompts), "item", tokens_per_second=meter.tokens_per_second())
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": meter.tokens,
        "total_tokens": prompt_tokens + meter.tokens,
    }
    return items, usage


def _default_batch() -> int:
    import torch

    return 32 if torch.cuda.is_available() else 8


def _tell_deltas(rows: Sequence[Any], batch: Sequence[Prompt], samples: int, emitter: Emitter) -> None:
    for number, row in enumerate(rows):
        delta = row.take_delta()
        if delta:
            extra = {"sample": number % samples} if samples > 1 else {}
            emitter.emit("text_delta", delta=delta, request=batch[number // samples].index, **extra)


def _item(prompt: Prompt, rows: Sequence[Any], prompt_tokens: int) -> dict[str, Any]:
    item = {
        "index": prompt.index,
        "input": prompt.given,
        "output": rows[0].text,
        "finish_reason": rows[0].finish_reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": sum(row.tokens for row in rows)},
    }
    if len(rows) > 1:
        item["outputs"] = [row.text for row in rows]
        item["finish_reasons"] = [row.finish_reason for row in rows]
    return item
