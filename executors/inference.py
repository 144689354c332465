"""The task type `inference`: answers prompts with a transformers model, in batches, and writes responses.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from executors.base import Executor, write_responses
from executors.data.sources import read_entries
from executors.generation.answers import batch_size, batches, item_of, result_of, tell_deltas
from executors.generation.meter import Meter
from executors.generation.parameters import read_sampling
from executors.generation.prompts import Prompt, read_prompts, render
from executors.merging import MergedChild, Result
from executors.modeling.libraries import prepare_libraries
from executors.sessions.unused import unused, with_warnings
from gpuflow.protocol import Emitter, Request


class Inference(Executor):
    """Answers every prompt of `data`; the result holds items (input, output, finish_reason), usage, model, engine."""

    task_types: ClassVar[tuple[str, ...]] = ("inference",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Check the request, load the model, generate batch by batch, write the answers and return them."""
        inference: Mapping[str, Any] = request.spec.get("inference") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        read_sampling(inference)
        prompts = read_prompts(read_entries(data, request.cache_dir, emitter), data)
        messages = unused(request.spec, engine="transformers", task_type=request.task_type)
        result = with_warnings(answer(request, lambda _: prompts, emitter), messages)
        write_responses(request, emitter, result)
        return result

    def run_children(self, request: Request, children: Sequence[MergedChild], emitter: Emitter) -> dict[str, Result]:
        """Answer the children of one model by one load of it, those of one sampling in one batch."""
        from executors.merged_inference import answer_children

        return answer_children(children, load, emitter)


def answer(request: Request, prompts_for: Callable[[Any], Sequence[Prompt]], emitter: Emitter) -> dict[str, Any]:
    """Load the model of a request, generate batch by batch, and return the result value: items, usage, model, engine.

    `prompts_for` makes the prompts for the loaded tokenizer. Raises ExecutorError: BadInput for sampling parameters, or
    a prompt, that no model could answer.
    """
    inference: Mapping[str, Any] = request.spec.get("inference") or {}
    sampling = read_sampling(inference)
    model, tokenizer, name = load(request, emitter)
    import torch

    from executors.generation.text_generator import TextGenerator, Weights

    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    prompts = prompts_for(tokenizer)
    emitter.status("working")
    weights = Weights(model, tokenizer)
    weights.grammars.check(sampling.structured)
    generator = TextGenerator(weights, sampling)
    return result_of(_answer_all(prompts, generator, tokenizer, inference, emitter), name, inference=inference)


def load(request: Request, emitter: Emitter) -> tuple[Any, Any, str]:
    """Return model, tokenizer and name of the model of a request."""
    for message in unused(request.spec, engine="transformers", task_type=request.task_type):
        emitter.emit("log", message=message)
    prepare_libraries()
    emitter.status("loading", "loading the model")
    import torch

    from executors.modeling.loading import apply_adapters, load_model, load_tokenizer, locate
    from executors.modeling.precision import inference_options

    location, adapters = locate(request, emitter)
    tokenizer = load_tokenizer(location, padding_side="left")
    options = {**inference_options(location), **((request.spec.get("model") or {}).get("transformers") or {})}
    if torch.cuda.device_count() > 1:
        options.setdefault("device_map", "auto")
    return apply_adapters(load_model(location, options), adapters), tokenizer, location.name


def _answer_all(
    prompts: Sequence[Prompt], generator: Any, tokenizer: Any, inference: Mapping[str, Any], emitter: Emitter
) -> list[dict[str, Any]]:
    meter = Meter()
    size = batch_size(inference, generator.sampling)
    stream = bool(inference.get("stream"))
    samples = generator.sampling.n
    items: list[dict[str, Any]] = []
    rendered = [render(prompt, tokenizer, inference) for prompt in prompts]
    lengths = generator.count_tokens(rendered)
    for span in batches([generator.leaves_room(length) for length in lengths], size):
        batch = [prompts[number] for number in span]

        def watch(rows: Sequence[Any], batch: Sequence[Prompt] = batch, start: int = span.start) -> None:
            if stream:
                for number, prompt in enumerate(batch):
                    tell_deltas(rows[number * samples : (number + 1) * samples], prompt, emitter)
            if meter.due():
                speed = meter.tokens_per_second(sum(row.tokens for row in rows))
                emitter.progress(start, len(prompts), "item", tokens_per_second=speed)

        for number, rows in zip(span, generator.answer([rendered[number] for number in span], watch), strict=True):
            meter.tokens += sum(row.tokens for row in rows)
            items.append(item_of(prompts[number], rows, lengths[number]))
        emitter.progress(len(items), len(prompts), "item", tokens_per_second=meter.tokens_per_second())
    return items
