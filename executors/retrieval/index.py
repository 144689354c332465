"""An index of passages: a folder with manifest.json, index.faiss and passages.jsonl. Written whole, checked when read.

The vectors lie in a flat FAISS index (exact search by inner product; with vectors of length 1 that is the cosine). An
index may come from anywhere: sizes and the header of its file are checked before FAISS reads it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from executors.base import bad_input, plain, write_json_atomically

#: Version of the folder's form.
SCHEMA: Final = 1
METRIC: Final = "inner_product"
MANIFEST: Final = "manifest.json"
VECTORS: Final = "index.faiss"
PASSAGES: Final = "passages.jsonl"
#: Most passages of an index.
MAX_PASSAGES: Final = 10_000_000
#: Longest line of passages.jsonl, in bytes: a passage with its source and heading.
MAX_LINE_BYTES: Final = 4 << 20
MAX_MANIFEST_BYTES: Final = 4 << 20
_MAX_DIMENSION: Final = 65_536
#: What FAISS writes before the vectors of a flat index: kind, dimension, count, two unused, trained, metric, floats.
_HEADER: Final = struct.Struct("<4siqqq?iQ")
_FLAT_INNER_PRODUCT: Final = (b"IxFI", 0)
#: Least cosine between the probe's vector now and when the index was made: other precisions differ by some 1e-4.
_LEAST_LIKENESS: Final = 0.995
#: What is embedded to know a model again.
PROBE: Final = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A piece of a document: `id` is unique in its index, `heading` the headings above it."""

    id: str
    text: str
    source: str = ""
    heading: str = ""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A passage that was found; the larger its score, the nearer it is."""

    passage: Passage
    score: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the manifest of an index says. `probe` is the vector of PROBE, by which its model is known again."""

    model: str
    dimension: int
    normalize: bool
    passages: int
    documents: int
    probe: tuple[float, ...]
    query_prefix: str = ""
    passage_prefix: str = ""


class Writer:
    """Adds passages and their vectors; `finish` writes what is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO = (folder / PASSAGES).open("xb")
        self._index: Any = None
        self.passages = 0

    def add(self, passages: Sequence[Passage], vectors: Any) -> None:
        """Add passages; `vectors` is an array of float32, a row for each. Raises BadInput for too many passages."""
        import faiss

        if self._index is None:
            self._index = faiss.IndexFlatIP(int(vectors.shape[1]))
        self.passages += len(passages)
        if self.passages > MAX_PASSAGES:
            raise bad_input(f"the documents have more than {MAX_PASSAGES} passages; make several indexes of them")
        for passage in passages:
            line = (json.dumps(plain(asdict(passage)), ensure_ascii=False) + "\n").encode()
            if len(line) > MAX_LINE_BYTES:
                raise bad_input(f"passage {passage.id[:200]} has {len(line)} bytes; lower chunks.size")
            self._file.write(line)
        self._index.add(vectors)

    def finish(self, facts: Facts) -> None:
        """Write the vectors and the manifest, all of it to the disk."""
        import faiss

        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        faiss.write_index(self._index, str(self._folder / VECTORS))
        with (self._folder / VECTORS).open("rb") as written:
            os.fsync(written.fileno())
        write_json_atomically(
            self._folder / MANIFEST, {"format": "gpuflow-index", "schema": SCHEMA, "metric": METRIC, **asdict(facts)}
        )

    def close(self) -> None:
        """Close the file of passages."""
        self._file.close()


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """Give the writer of an index; `folder` appears by rename when the block has ended well."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    fresh.mkdir(parents=True)
    writer = Writer(fresh)
    try:
        yield writer
        fresh.rename(folder)
    finally:
        writer.close()
        shutil.rmtree(fresh, ignore_errors=True)


class Index:
    """An index that was checked and loaded. For one thread."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        import faiss

        self.facts = facts
        self._places = _line_starts(folder / PASSAGES, facts.passages)
        _check_vectors(folder / VECTORS, facts)
        self._index = faiss.read_index(str(folder / VECTORS))
        self._file: BinaryIO = (folder / PASSAGES).open("rb")

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Load the index of a folder. Raises ExecutorError: BadInput for what is none, is torn, or of another form."""
        return cls(folder, read_facts(folder))

    def search(self, vectors: Any, top_k: int, threshold: float | None = None) -> list[list[Hit]]:
        """Return for each row of `vectors` the nearest passages, the best first, none below `threshold`."""
        scores, numbers = self._index.search(vectors, min(top_k, self.facts.passages))
        return [
            [
                Hit(passage=self._passage(int(number)), score=float(score))
                for score, number in zip(*row, strict=True)
                if number >= 0 and math.isfinite(score) and (threshold is None or score >= threshold)
            ]
            for row in zip(scores, numbers, strict=True)
        ]

    def check_model(self, probe: Any, model: str) -> None:
        """Compare the probe's vector with the one in the manifest. Raises ExecutorError: BadInput for another model."""
        made_with = f"the index was made with {self.facts.model} (dimension {self.facts.dimension}"
        if len(probe) != self.facts.dimension:
            raise bad_input(
                f"{made_with}), and {model} has dimension {len(probe)}; set embedding.model to the model of the index, "
                "or make the index again"
            )
        if _cosine(probe, self.facts.probe) < _LEAST_LIKENESS:
            raise bad_input(
                f"{made_with}), and {model} gives other vectors; set embedding.model to the model of the index, or "
                "make the index again"
            )

    def close(self) -> None:
        """Close the file of passages."""
        self._file.close()

    def _passage(self, number: int) -> Passage:
        self._file.seek(self._places[number])
        line = self._file.readline(MAX_LINE_BYTES)
        try:
            found = json.loads(line)
            return Passage(**{name: str(found.get(name) or "") for name in ("id", "text", "source", "heading")})
        except (ValueError, AttributeError, RecursionError) as error:
            raise bad_input(f"{PASSAGES} line {number + 1} of the index is no passage; make the index again") from error


def read_facts(folder: Path) -> Facts:
    """Return what the manifest of an index says. Raises ExecutorError: BadInput."""
    path = folder / MANIFEST
    if not path.is_file():
        raise bad_input(f"{folder} holds no index: there is no {MANIFEST} in it; give final_index of a rag task")
    with path.open("rb") as file:
        raw = file.read(MAX_MANIFEST_BYTES + 1)
    try:
        found = json.loads(raw) if len(raw) <= MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping) or found.get("format") != "gpuflow-index":
        raise bad_input(f"{path.name} of the index is not that of an index; give final_index of a rag task")
    if found.get("schema") != SCHEMA:
        raise bad_input(
            f"the index has schema {str(found.get('schema'))[:20]!r}, this version reads {SCHEMA}; make the index again"
        )
    if found.get("metric") != METRIC:
        raise bad_input(f"the index has metric {str(found.get('metric'))[:40]!r}; this version has {METRIC}")
    try:
        return _facts(found)
    except (KeyError, TypeError, ValueError) as error:
        raise bad_input(f"{MANIFEST} of the index is broken ({error}); make the index again") from error


def _facts(found: Mapping[str, Any]) -> Facts:
    numbers = {name: found[name] for name in ("dimension", "passages", "documents")}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is no number")
    if not 0 < numbers["dimension"] <= _MAX_DIMENSION or not 0 < numbers["passages"] <= MAX_PASSAGES:
        raise ValueError("dimension or passages is out of range")
    probe = tuple(float(value) for value in found["probe"])
    if len(probe) != numbers["dimension"] or not all(math.isfinite(value) for value in probe):
        raise ValueError("probe does not fit the dimension")
    texts = {name: found[name] for name in ("model", "query_prefix", "passage_prefix")}
    if not all(isinstance(value, str) and len(value) <= 1000 for value in texts.values()):
        raise ValueError("model or a prefix is no text")
    if not isinstance(found["normalize"], bool):
        raise ValueError("normalize is not true or false")
    return Facts(**numbers, **texts, normalize=found["normalize"], probe=probe)


def _check_vectors(path: Path, facts: Facts) -> None:
    """Check the header and the size of the file, so that FAISS reads nothing but that many vectors."""
    torn = f"{VECTORS} of the index does not fit its {MANIFEST}; make the index again"
    if not path.is_file():
        raise bad_input(f"the index has no {VECTORS}; make the index again")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise bad_input(torn)
    kind, dimension, count, _, _, _, metric, floats = _HEADER.unpack(head)
    whole = _HEADER.size + 4 * facts.dimension * facts.passages
    if (kind, metric) != _FLAT_INNER_PRODUCT or (dimension, count) != (facts.dimension, facts.passages):
        raise bad_input(torn)
    if floats != dimension * count or size != whole:
        raise bad_input(torn)


def _line_starts(path: Path, count: int) -> array[int]:
    """Return where each line begins. Raises ExecutorError: BadInput for another number of lines, or one too long."""
    if not path.is_file():
        raise bad_input(f"the index has no {PASSAGES}; make the index again")
    starts = array("q")
    position = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES or len(starts) == count:
                break
            starts.append(position)
            position += len(line)
    if len(starts) != count or position != path.stat().st_size:
        raise bad_input(f"{PASSAGES} of the index does not hold its {count} passages; make the index again")
    return starts


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    dot = sum(float(a) * b for a, b in zip(one, other, strict=True))
    lengths = math.sqrt(sum(float(a) ** 2 for a in one) * sum(b**2 for b in other))
    return dot / lengths if lengths else 0.0
