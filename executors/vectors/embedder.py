"""A loaded model that embeds texts batch by batch: what the task types embedding and rag share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.generation.answers import default_rows
from executors.sessions.lines import Open
from executors.sessions.transformers_loading import load_base
from executors.vectors.encoder import Encoder, tokenized
from executors.vectors.pooling import read_pooling
from executors.vectors.results import normalized
from gpuflow.protocol import Emitter


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The vector of one text (float32), its number of tokens, and whether it was cut to fit the model."""

    vector: Any
    tokens: int
    cut: bool


class Embedder:
    """An encoder with the settings of an `embedding` section."""

    def __init__(self, name: str, model: Any, encoder: Encoder, section: Mapping[str, Any]) -> None:
        self.name = name
        self.model = model
        self.encoder = encoder
        normalize = section.get("normalize")
        self.normalize = encoder.pooling.normalize if normalize is None else bool(normalize)
        self.batch_size = int(section.get("batch_size") or default_rows())

    @classmethod
    def load(cls, opening: Open, emitter: Emitter) -> Embedder:
        """Load the model of an opening, without its output layer. Raises ExecutorError."""
        location, model, tokenizer, _ = load_base(opening, emitter, padding_side="right", headless=True)
        encoder = Encoder(model, tokenizer, read_pooling(location))
        return cls(location.name, model, encoder, opening.spec.get("embedding") or {})

    def embed(self, texts: Sequence[str], model: Any = None) -> Iterator[list[Embedded]]:
        """Yield the texts' vectors in order, one batch at a time; `model` stands in for the loaded one."""
        tokens, cut = tokenized(texts, self.encoder.tokenizer, self.encoder.max_tokens)
        for start in range(0, len(texts), self.batch_size):
            batch = tokens[start : start + self.batch_size]
            yield [
                Embedded(
                    vector=normalized(vector) if self.normalize else vector,
                    tokens=len(tokens[number]),
                    cut=cut[number],
                )
                for number, vector in enumerate(self.encoder.embed(batch, model), start=start)
            ]

    def count_tokens(self, words: Sequence[str]) -> list[int]:
        """Return the number of tokens of each word, at least 1."""
        found = self.encoder.tokenizer(list(words), add_special_tokens=False)["input_ids"]
        return [max(1, len(one)) for one in found]
