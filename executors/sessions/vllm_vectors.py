"""Vectors of a vLLM session: pooling as the model says, the same as on transformers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from executors.base import bad_input, write_responses
from executors.data.sources import read_entries
from executors.generation.meter import Meter
from executors.modeling.loading import load_tokenizer
from executors.modeling.location import Location
from executors.sessions.adapters import adapters_of
from executors.sessions.engine import together
from executors.vectors.encoder import tokenized
from executors.vectors.pooling import Pooling, read_pooling
from executors.vectors.results import item_of, normalized, vectors_result
from executors.vectors.texts import Text, read_texts
from gpuflow.protocol import Emitter, Request

#: Types of models whose positions begin behind that of the padding token.
_PADDED: Final = ("roberta", "xlm-roberta")
_TYPES: Final = {"mean": "MEAN", "cls": "CLS", "last": "LAST"}


def pooling_arguments(location: Location) -> dict[str, Any]:
    """Return the arguments of an engine that pools. Raises ExecutorError: BadInput for a way that vLLM has not."""
    from vllm.config import PoolerConfig

    pooling = read_pooling(location)
    if pooling.mode not in _TYPES:
        raise bad_input(f"vLLM does not pool by {pooling.mode}; use engine: transformers")
    return {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": PoolerConfig(seq_pooling_type=_TYPES[pooling.mode], use_activation=False),
    }


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request that has been read."""

    request: Request
    emitter: Emitter
    texts: Sequence[Text]
    tokens: Sequence[list[int]]
    cut: Sequence[bool]
    normalize: bool
    lora: Any
    at_once: int
    meter: Meter
    items: dict[int, dict[str, Any]] = field(default_factory=dict)


def _before_first(config: Any) -> int:
    """How many positions of a model come before that of the first token: RoBERTa counts from behind the padding's."""
    return config.pad_token_id + 1 if config.model_type in _PADDED and config.pad_token_id is not None else 0


class Vectors:
    """Asks one AsyncLLM. `engine` names adapters and says how much it does at once."""

    def __init__(self, llm: Any, location: Location, engine: Any) -> None:
        self._llm = llm
        self._engine = engine
        self._name = location.name
        self._tokenizer = load_tokenizer(location, padding_side="right")
        self._pooling: Pooling = read_pooling(location)
        config = llm.vllm_config.model_config
        positions = config.max_model_len - _before_first(config.hf_config)
        self._max_tokens = min(filter(None, (self._pooling.max_tokens, positions)))
        self._numbers = itertools.count(1)

    def read(self, request: Request, emitter: Emitter) -> _Asked:
        """Read a request; in a thread. Raises ExecutorError: BadInput."""
        given: Mapping[str, Any] = request.spec.get("embedding") or {}
        data: Mapping[str, Any] = request.spec.get("data") or {}
        texts = read_texts(read_entries(data, request.cache_dir, emitter), data, given.get("query_prefix") or "")
        tokens, cut = tokenized([text.text for text in texts], self._tokenizer, self._max_tokens)
        normalize = given.get("normalize")
        return _Asked(
            request=request,
            emitter=emitter,
            texts=texts,
            tokens=tokens,
            cut=cut,
            normalize=self._pooling.normalize if normalize is None else bool(normalize),
            lora=self._engine.lora_request(adapters_of(request)),
            at_once=int(given.get("batch_size") or self._engine.max_requests),
            meter=Meter(),
        )

    async def run(self, asked: _Asked) -> dict[str, Any]:
        """Embed all texts of a request, write the vectors and return the result value."""
        asked.emitter.status("working")
        places = asyncio.Semaphore(asked.at_once)
        await together(self._embed(index, asked, places) for index in range(len(asked.texts)))
        return await asyncio.to_thread(self._written, asked)

    async def _embed(self, index: int, asked: _Asked, places: asyncio.Semaphore) -> None:
        from vllm import PoolingParams

        tokens = asked.tokens[index]
        vector: Any = None
        async with places:
            found = self._llm.encode(
                {"prompt_token_ids": tokens},
                PoolingParams(task="embed", use_activation=False),
                f"{asked.request.task_id}-{next(self._numbers)}",
                lora_request=asked.lora,
            )
            async for output in found:
                vector = output.outputs.data.float().cpu().numpy()
        whole = normalized(vector) if asked.normalize else vector
        asked.items[index] = item_of(asked.texts[index], whole, len(tokens), cut=asked.cut[index])
        asked.meter.tokens += len(tokens)
        done, total = len(asked.items), len(asked.texts)
        if done == total or asked.meter.due():
            asked.emitter.progress(done, total, "item", tokens_per_second=asked.meter.tokens_per_second())

    def _written(self, asked: _Asked) -> dict[str, Any]:
        items = [asked.items[index] for index in sorted(asked.items)]
        result = vectors_result(items, self._name, "vllm", asked.request, asked.emitter)
        write_responses(asked.request, asked.emitter, result)
        return result
