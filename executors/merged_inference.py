"""Merged calls of `inference`: children of one model are answered by one load of it, those of one sampling in batches.

Used by `executors.inference` alone. A child that cannot be answered fails alone: it is checked before it joins a batch,
and a batch that fails all the same is answered again, child by child.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from executors import cancellation
from executors.base import write_responses
from executors.data.sources import read_entries
from executors.generation.answers import batch_size, batches, item_of, result_of, tell_deltas
from executors.generation.memory import free_unused
from executors.generation.parameters import Sampling, read_sampling
from executors.generation.prompts import Prompt, Rendered, read_prompts, render
from executors.merging import ChildEmitter, MergedChild, Result, failed
from gpuflow.protocol import Emitter, Request

#: Fields of `inference` that one prompt is rendered, told or bound by: calls that differ in them alone share a batch.
_OF_ONE_CALL: Final = frozenset(
    {
        "system_prompt", "stream", "batch_size", "chat_template", "chat_template_kwargs", "add_generation_prompt",
        "structured_outputs",
    }
)  # fmt: skip

#: Returns model, tokenizer and name for a request.
Load = Callable[[Request, Emitter], tuple[Any, Any, str]]


@dataclass(kw_only=True)
class _Call:
    """One child that has been read; `rendered` are its prompts, `tokens` their lengths, `items` the answered ones."""

    child: MergedChild
    emitter: Emitter
    inference: Mapping[str, Any]
    sampling: Sampling
    prompts: Sequence[Prompt]
    rendered: list[Rendered] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    room: list[bool] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def model_key(self) -> str:
        """Equal for calls that one loaded model answers."""
        request = self.child.request
        return json.dumps([request.spec.get("model"), request.checkpoint_path], sort_keys=True, default=str)

    @property
    def batch_key(self) -> str:
        """Equal for calls that one batch answers.

        A seeded call that is not greedy is a batch of its own: its answer must not depend on who came with it.
        """
        own = {name: value for name, value in self.inference.items() if name not in _OF_ONE_CALL}
        alone = "" if self.sampling.greedy or self.sampling.seed is None else self.child.id
        return json.dumps([own, alone], sort_keys=True, default=str)


def answer_children(children: Sequence[MergedChild], load: Load, emitter: Emitter) -> dict[str, Result]:
    """Return the result of each child by its id, an error for one that failed."""
    results: dict[str, Result] = {}
    calls = []
    for child in children:
        try:
            calls.append(_read(child, emitter))
        except Exception as error:  # noqa: BLE001  (one bad child fails alone)
            results[child.id] = failed(error)
    for group in _groups(calls, lambda call: call.model_key):
        try:
            model, tokenizer, name = load(group[0].child.request, emitter)
        except Exception as error:  # noqa: BLE001  (children of another model may do)
            results |= {call.child.id: failed(error) for call in group}
            continue
        emitter.status("working")
        from executors.generation.text_generator import Weights

        weights = Weights(model, tokenizer)
        for batch in _groups(group, lambda call: call.batch_key):
            _answer_alike(batch, weights, name, results)
            emitter.progress(len(results), len(children), "child")
    return results


def _read(child: MergedChild, emitter: Emitter) -> _Call:
    inference: Mapping[str, Any] = child.request.spec.get("inference") or {}
    data: Mapping[str, Any] = child.request.spec.get("data") or {}
    told = ChildEmitter(emitter, child.id)
    return _Call(
        child=child,
        emitter=told,
        inference=inference,
        sampling=read_sampling(inference),
        prompts=read_prompts(read_entries(data, child.request.cache_dir, told), data),
    )


def _groups(calls: Sequence[_Call], key: Callable[[_Call], str]) -> Iterator[list[_Call]]:
    found: dict[str, list[_Call]] = {}
    for call in calls:
        found.setdefault(key(call), []).append(call)
    yield from found.values()


def _answer_alike(calls: Sequence[_Call], weights: Any, name: str, results: dict[str, Result]) -> None:
    """Answer calls of one model and one sampling, and write the files of each."""
    from executors.generation.text_generator import TextGenerator

    generator = TextGenerator(weights, calls[0].sampling)
    good = []
    for call in calls:
        try:
            call.rendered = [render(prompt, weights.tokenizer, call.inference) for prompt in call.prompts]
            call.tokens = generator.count_tokens(call.rendered)
            weights.grammars.check(call.sampling.structured)
            call.room = [generator.leaves_room(count) for count in call.tokens]
            good.append(call)
        except Exception as error:  # noqa: BLE001  (one bad child fails alone)
            results[call.child.id] = failed(error)
    if good:
        _answer_or_split(good, generator, name, results)


def _answer_or_split(calls: Sequence[_Call], generator: Any, name: str, results: dict[str, Result]) -> None:
    try:
        _answer(calls, generator, stream=True)
    except Exception as error:  # noqa: BLE001  (one bad child fails alone)
        if len(calls) == 1:
            results[calls[0].child.id] = failed(error)
            return
        cancellation.check()
        traceback.print_exception(error)
    else:
        for call in calls:
            results[call.child.id] = _written(call, name)
        return
    for call in calls:
        results[call.child.id] = _again(call, generator, name)


def _again(call: _Call, generator: Any, name: str) -> Result:
    """Answer one call of a batch that failed. Nothing is streamed: what was told already stays, the result is whole."""
    free_unused()
    call.items.clear()
    try:
        _answer([call], generator, stream=False)
    except Exception as error:  # noqa: BLE001  (one bad child fails alone)
        return failed(error)
    return _written(call, name)


def _written(call: _Call, name: str) -> Result:
    result = result_of(call.items, name, inference=call.inference)
    try:
        write_responses(call.child.request, call.emitter, result)
    except Exception as error:  # noqa: BLE001  (one bad child fails alone)
        return failed(error)
    return result


def _answer(calls: Sequence[_Call], generator: Any, *, stream: bool) -> None:
    from executors.generation.randomness import apart, begin

    with nullcontext() if generator.sampling.seed is None else apart():
        if generator.sampling.seed is not None:
            begin(None, generator.sampling.seed)
        _answer_batches(calls, generator, stream=stream)


def _answer_batches(calls: Sequence[_Call], generator: Any, *, stream: bool) -> None:
    todo = [(call, number) for call in calls for number in range(len(call.prompts))]
    size = max(batch_size(call.inference, generator.sampling) for call in calls)
    samples = generator.sampling.n
    for span in batches([call.room[number] for call, number in todo], size):
        batch = [todo[place] for place in span]

        def watch(rows: Sequence[Any], batch: Sequence[tuple[_Call, int]] = batch) -> None:
            for place, (call, number) in enumerate(batch):
                if stream and call.inference.get("stream"):
                    tell_deltas(rows[place * samples : (place + 1) * samples], call.prompts[number], call.emitter)

        structures = [call.sampling.structured for call, _ in batch]
        answers = generator.answer([call.rendered[number] for call, number in batch], watch, structures)
        for (call, number), rows in zip(batch, answers, strict=True):
            call.items.append(item_of(call.prompts[number], rows, call.tokens[number]))
