"""From a document to its passages: by its headings where it is markdown, then by size. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from executors.retrieval.chunking import Chunking, CountTokens, Section, markdown_sections, passages_of
from executors.retrieval.documents import Document
from executors.retrieval.index import Passage


def cut(
    document: Document, chunking: Chunking, count_tokens: CountTokens, numbers: dict[str, int]
) -> Iterator[Passage]:
    """Yield the passages of a document in order; `id` is its source and a number.

    `numbers` has the last number of each source, as rows of one source are documents of their own.
    """
    whole = (Section(headings=(), start=0, end=len(document.text)),)
    for section in markdown_sections(document.text) if document.is_markdown else whole:
        text = document.text[section.start : section.end]
        heading = " > ".join(filter(None, (document.heading, *section.headings)))
        for start, end in passages_of(text, chunking, count_tokens):
            number = numbers[document.source] = numbers.get(document.source, 0) + 1
            yield Passage(
                id=f"{document.source}#{number}", text=text[start:end], source=document.source, heading=heading
            )
