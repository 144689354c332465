"""The result value of embeddings. Vectors stand in it; where they are many, in a file beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from executors.vectors.texts import Text
from gpuflow.protocol import Emitter, Request

#: Most numbers that a result holds itself, as text some 2 MB; more of them are rows of a file.
MAX_NUMBERS: Final = 100_000
#: The file: float32, one row a text, for `numpy.load`.
VECTORS: Final = "embeddings.npy"


def item_of(text: Text, vector: Any, tokens: int, *, cut: bool) -> dict[str, Any]:
    """Return the item of one text; `vector` is an array of float32, `tokens` what was embedded, `cut` if not all."""
    item = {"index": text.index, "input": text.given, "embedding": vector, "usage": {"prompt_tokens": tokens}}
    return {**item, "truncated": True} if cut else item


def vectors_result(
    items: Sequence[Mapping[str, Any]], model: str, engine: str, request: Request, emitter: Emitter
) -> dict[str, Any]:
    """Return the result value of all items; writes and declares the file of vectors where there are many."""
    import numpy

    matrix = numpy.stack([item["embedding"] for item in items])
    if matrix.size > MAX_NUMBERS:
        _write(matrix, Path(request.output_dir) / VECTORS)
        emitter.artifact(VECTORS)
        told: Sequence[Any] = [{"file": VECTORS, "row": row} for row in range(len(items))]
    else:
        told = [vector.tolist() for vector in matrix]
    tokens = sum(item["usage"]["prompt_tokens"] for item in items)
    return {
        "items": [{**item, "embedding": vector} for item, vector in zip(items, told, strict=True)],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        "dimensions": int(matrix.shape[1]),
        "model": model,
        "engine": engine,
    }


def _write(matrix: Any, path: Path) -> None:
    import numpy

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            numpy.save(file, matrix)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def normalized(vector: Any) -> Any:
    """Return a vector of length 1; one of zeros stays as it is."""
    import numpy

    length = float(numpy.linalg.norm(vector))
    return vector / length if length else vector
