"""Makes an index of documents: they are read, cut, embedded and written as they come, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executors.base import bad_input
from executors.retrieval.chunking import read_chunking
from executors.retrieval.documents import Documents
from executors.retrieval.index import PROBE, Facts, Passage, Writer, writing
from executors.retrieval.passages import cut

if TYPE_CHECKING:
    from executors.vectors.embedder import Embedder

#: Batches of passages that are embedded before they are written.
_BATCHES_AT_ONCE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of the documents; `truncated` passages were embedded in part, `tokens` were embedded in all."""

    documents: int
    blank_documents: int
    passages: int
    truncated: int
    tokens: int
    dimension: int


class Making:
    """Makes one index with a loaded model; `section` is the section `embedding` of the task."""

    def __init__(self, *, model: str, embedder: Embedder, section: Mapping[str, Any]) -> None:
        self._model, self._embedder = model, embedder
        self._query_prefix = section.get("query_prefix") or ""
        self._passage_prefix = section.get("passage_prefix") or ""
        self._documents = self._blank = self._truncated = self._tokens = 0

    def run(
        self,
        folder: Path,
        documents: Documents,
        chunks: Mapping[str, Any] | None,
        on_progress: Callable[[int, int], None],
    ) -> Made:
        """Write the index to `folder`, which appears whole; `on_progress` takes documents and passages so far.

        Raises ExecutorError: BadInput for chunks that the model cannot read, and for documents without words.
        """
        passages = self._passages(documents, chunks)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with writing(folder) as writer:
            done = 0
            for batch in _grouped(passages, self._embedder.batch_size * _BATCHES_AT_ONCE):
                self._add(writer, [passage for _, passage in batch])
                if batch[-1][0] > done + 1:
                    done = batch[-1][0] - 1  # the last document may go on in the next batch
                    on_progress(done, writer.passages)
            if not writer.passages:
                raise bad_input("the documents hold no words; give documents with text")
            probe = probe_of(self._embedder)
            facts = Facts(
                model=self._model,
                dimension=len(probe),
                normalize=self._embedder.normalize,
                passages=writer.passages,
                documents=self._documents,
                probe=tuple(probe),
                query_prefix=self._query_prefix,
                passage_prefix=self._passage_prefix,
            )
            writer.finish(facts)
        on_progress(documents.count, facts.passages)
        return Made(
            documents=self._documents,
            blank_documents=self._blank,
            passages=facts.passages,
            truncated=self._truncated,
            tokens=self._tokens,
            dimension=facts.dimension,
        )

    def _passages(self, documents: Documents, chunks: Mapping[str, Any] | None) -> Iterator[tuple[int, Passage]]:
        """Yield the passages of all documents, each with the number of its document."""
        chunking = read_chunking(chunks, self._embedder.encoder.max_tokens)
        numbers: dict[str, int] = {}
        for number, document in enumerate(documents.read(), start=1):
            before = numbers.get(document.source, 0)
            for passage in cut(document, chunking, self._embedder.count_tokens, numbers):
                yield number, passage
            if numbers.get(document.source, 0) > before:
                self._documents += 1
            else:
                self._blank += 1

    def _add(self, writer: Writer, passages: Sequence[Passage]) -> None:
        import numpy

        texts = [self._passage_prefix + (f"{one.heading}\n{one.text}" if one.heading else one.text) for one in passages]
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # alike ones together: less padding
        done = [one for batch in self._embedder.embed([texts[number] for number in order]) for one in batch]
        self._tokens += sum(one.tokens for one in done)
        self._truncated += sum(one.cut for one in done)
        vectors = numpy.empty((len(texts), len(done[0].vector)), dtype="float32")
        for number, one in zip(order, done, strict=True):
            vectors[number] = one.vector
        writer.add(passages, vectors)


def probe_of(embedder: Embedder) -> list[float]:
    """Return the vector of PROBE."""
    ((probe,),) = embedder.embed([PROBE])
    return [float(value) for value in probe.vector]


def _grouped(entries: Iterator[tuple[int, Passage]], size: int) -> Iterator[list[tuple[int, Passage]]]:
    group: list[tuple[int, Passage]] = []
    for entry in entries:
        group.append(entry)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
