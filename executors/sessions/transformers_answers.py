"""Batches of prompts on transformers: the work of an inference session.

Requests of one sampling share batches. A seeded request that is not greedy shares with nobody, and random numbers of
its own go with it from batch to batch. A prompt that leaves less room than max_tokens is a batch by itself, as the rows
of a batch have the room of its longest prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from executors.data.sources import read_entries
from executors.generation.answers import batch_size, default_rows, item_of, result_of, tell_deltas
from executors.generation.meter import Meter
from executors.generation.parameters import Sampling, read_sampling
from executors.generation.prompts import Prompt, Rendered, read_prompts, render
from executors.generation.randomness import apart, begin, reached
from executors.generation.rows import Row
from executors.generation.text_generator import TextGenerator, Weights
from executors.sessions.adapter_switch import AdapterSwitch, key_of
from executors.sessions.adapters import adapters_of
from executors.sessions.batching import Unit
from executors.sessions.engine import Loaded
from executors.sessions.lines import Open
from executors.sessions.transformers_engine import Call
from gpuflow.protocol import Emitter, Request


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is asked: prompts as given, rendered, and their lengths in tokens."""

    sampling: Sampling
    prompts: Sequence[Prompt]
    rendered: Sequence[Rendered]
    tokens: Sequence[int]
    meter: Meter


class Answers:
    """A language model that answers prompts."""

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Load model and tokenizer; adapters come with the requests."""
        from executors.sessions.transformers_loading import load_base

        location, model, tokenizer, revision = load_base(opening, emitter, padding_side="left")
        self._name = location.name
        self._weights = Weights(model, tokenizer)
        self._switch = AdapterSwitch(model)
        return Loaded(model=location.name, revision=revision, max_requests=default_rows())

    def read(self, request: Request, emitter: Emitter, done: asyncio.Future[list[dict[str, Any]]]) -> Call:
        """Return the call of a request, its prompts rendered and counted."""
        inference: Mapping[str, Any] = request.spec.get("inference") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        sampling = read_sampling(inference)
        prompts = read_prompts(read_entries(data, request.cache_dir, emitter), data)
        rendered = [render(prompt, self._weights.tokenizer, inference) for prompt in prompts]
        self._weights.grammars.check(sampling.structured)
        generator = TextGenerator(self._weights, sampling)
        tokens = generator.count_tokens(rendered)
        room = [generator.leaves_room(count) for count in tokens]
        alone = sampling.seed is not None and not sampling.greedy
        adapters = adapters_of(request)
        size = batch_size(inference, sampling)
        return Call(
            request=request,
            emitter=emitter,
            key=(sampling, key_of(adapters), size),
            batch_size=size,
            units=len(prompts),
            adapters=adapters,
            alone=alone,
            lonely=frozenset(index for index, fits in enumerate(room) if not fits),
            content=_Asked(sampling=sampling, prompts=prompts, rendered=rendered, tokens=tokens, meter=Meter()),
            stream=bool(inference.get("stream")),
            done=done,
        )

    def do(self, batch: Sequence[Unit[Call]]) -> None:
        """Answer units of one sampling and finish each as soon as it has ended."""
        first = batch[0].call
        sampling: Sampling = first.content.sampling
        rendered = [unit.call.content.rendered[unit.index] for unit in batch]
        samples = sampling.n

        def watch(rows: Sequence[Row]) -> None:
            for number, unit in enumerate(batch):
                _follow(unit, rows[number * samples : (number + 1) * samples])

        with self._switch.using(first.adapters) as model, apart() if first.alone else nullcontext():
            if first.alone:
                begin(first.state, sampling.seed or 0)
            TextGenerator(self._weights, sampling, model).answer(rendered, watch)
            if first.alone:
                first.state = reached()

    def result(self, items: Sequence[Mapping[str, Any]], call: Call) -> dict[str, Any]:
        """Return the result value of an inference."""
        return result_of(items, self._name, inference=call.request.spec.get("inference"))


def _follow(unit: Unit[Call], rows: Sequence[Row]) -> None:
    """After a step: tell what is new of a unit, finish it if it has ended, stop it if nobody waits for it."""
    call, asked = unit.call, unit.call.content
    if unit.index in call.items:
        return
    if not call.live:
        for row in rows:
            row.abort()
        return
    if call.stream:
        tell_deltas(rows, asked.prompts[unit.index], call.emitter)
    if all(row.finish_reason is not None for row in rows):
        asked.meter.tokens += sum(row.tokens for row in rows)
        done = len(call.items) + 1
        if done == call.units or asked.meter.due():
            call.emitter.progress(done, call.units, "item", tokens_per_second=asked.meter.tokens_per_second())
        call.finish_unit(unit.index, item_of(asked.prompts[unit.index], rows, asked.tokens[unit.index]))
