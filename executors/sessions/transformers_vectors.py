"""Batches of texts on transformers: the work of an embedding session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.data.sources import read_entries
from executors.generation.answers import default_rows
from executors.generation.meter import Meter
from executors.sessions.adapter_switch import AdapterSwitch, key_of
from executors.sessions.adapters import adapters_of
from executors.sessions.batching import Unit
from executors.sessions.engine import Loaded
from executors.sessions.lines import Open
from executors.sessions.transformers_engine import Call
from executors.vectors.encoder import Encoder, tokenized
from executors.vectors.pooling import read_pooling
from executors.vectors.results import item_of, normalized, vectors_result
from executors.vectors.texts import Text, read_texts
from gpuflow.protocol import Emitter, Request


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Texts, their tokens, and whether each was cut."""

    texts: Sequence[Text]
    tokens: Sequence[Sequence[int]]
    cut: Sequence[bool]
    normalize: bool
    meter: Meter


class Vectors:
    """A model that embeds texts."""

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Load model, tokenizer and how its vectors are pooled; adapters come with the requests."""
        from executors.sessions.transformers_loading import load_base

        location, model, tokenizer, revision = load_base(opening, emitter, padding_side="right", headless=True)
        self._name = location.name
        self._encoder = Encoder(model, tokenizer, read_pooling(location))
        self._switch = AdapterSwitch(model, headless=True)
        return Loaded(model=location.name, revision=revision, max_requests=default_rows())

    def read(self, request: Request, emitter: Emitter, done: asyncio.Future[list[dict[str, Any]]]) -> Call:
        """Return the call of a request, its texts as tokens."""
        given: Mapping[str, Any] = request.spec.get("embedding") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        texts = read_texts(read_entries(data, request.cache_dir, emitter), data, given.get("query_prefix") or "")
        tokens, cut = tokenized([text.text for text in texts], self._encoder.tokenizer, self._encoder.max_tokens)
        normalize = given.get("normalize")
        adapters = adapters_of(request)
        size = int(given.get("batch_size") or default_rows())
        return Call(
            request=request,
            emitter=emitter,
            key=(key_of(adapters), size),
            batch_size=size,
            units=len(texts),
            adapters=adapters,
            content=_Asked(
                texts=texts,
                tokens=tokens,
                cut=cut,
                normalize=self._encoder.pooling.normalize if normalize is None else bool(normalize),
                meter=Meter(),
            ),
            done=done,
        )

    def do(self, batch: Sequence[Unit[Call]]) -> None:
        """Embed units and finish them."""
        with self._switch.using(batch[0].call.adapters) as model:
            vectors = self._encoder.embed([unit.call.content.tokens[unit.index] for unit in batch], model)
        for unit, vector in zip(batch, vectors, strict=True):
            self._finish(unit.call, unit.index, vector)

    def _finish(self, call: Call, index: int, vector: Any) -> None:
        asked: _Asked = call.content
        done = len(call.items) + 1
        asked.meter.tokens += len(asked.tokens[index])
        if call.live and (done == call.units or asked.meter.due()):
            call.emitter.progress(done, call.units, "item", tokens_per_second=asked.meter.tokens_per_second())
        whole = normalized(vector) if asked.normalize else vector
        call.finish_unit(index, item_of(asked.texts[index], whole, len(asked.tokens[index]), cut=asked.cut[index]))

    def result(self, items: Sequence[Mapping[str, Any]], call: Call) -> dict[str, Any]:
        """Return the result value of an embedding."""
        return vectors_result(items, self._name, "transformers", call.request, call.emitter)
