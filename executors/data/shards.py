"""Cuts the rows of a task whose data is split over several: its range of them, in place of where they came from.

Runs in the child before the executor, which sees a task with plain rows. What it had, and what there was, goes into the
result as `shard`; the join compares them (`gpuflow.pipelines.collect`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from executors.base import MERGED, ExecutorError, bad_input, write_responses
from gpuflow.protocol import Emitter, Request
from gpuflow.spec.sharding import shard_range

#: Fields of `data` that say where rows come from and which: done with when they are cut.
_SOURCE: Final = frozenset(
    {
        "type", "path", "url", "upload", "sha256", "name", "split", "eval_split", "revision", "trust_remote_code",
        "messages", "shuffle", "seed", "max_items", "shard",
    }
)  # fmt: skip
#: Fields of `data` that hold rows.
_ROWS: Final = ("items", "prompts", "preferences")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows that a task has: `start` to `end` of `total`; `digest` is of all rows, where they were read here."""

    index: int
    count: int
    start: int
    end: int
    total: int
    digest: str | None = None

    def completed(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return a result that says which rows it is of."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return {**result, "shard": said}

    def empty_result(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Write and return the result of a shard without rows; no model is loaded for it."""
        result: dict[str, Any] = {"items": []}
        write_responses(request, emitter, result)
        return result


def take_shard(request: Request, emitter: Emitter) -> tuple[Request, Shard | None]:
    """Return the request with the rows of its shard in place of all, and the shard; as it is, and None, without one.

    Raises ExecutorError: BadInput as `sources.read_entries` does, and for data without any rows; ShardMismatch for rows
    that are not those that were cut at dispatch.
    """
    data = request.spec.get("data")
    asked = data.get("shard") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(asked, Mapping) or MERGED in request.spec:
        return request, None
    rest = {name: value for name, value in data.items() if name != "shard"}
    if asked.get("total") is not None:
        shard = Shard(**{name: int(asked[name]) for name in ("index", "count", "start", "end", "total")})
        field = next((name for name in _ROWS if isinstance(data.get(name), list)), "items")
        rows = data.get(field) or ()
        if len(rows) != shard.end - shard.start:
            raise ExecutorError(
                "ShardMismatch",
                f"data.{field} has {len(rows)} rows, but this shard is rows {shard.start} to {shard.end} of "
                f"{shard.total}; submit the pipeline again",
            )
        return replace(request, spec={**request.spec, "data": rest}), shard
    from executors.data.sources import read_entries

    entries = read_entries(rest, request.cache_dir, emitter)
    if not entries:
        raise bad_input("the data has no rows; check data.path, data.split and data.max_items")
    index, count = int(asked["index"]), int(asked["count"])
    start, end = shard_range(len(entries), index, count)
    emitter.emit("log", message=f"shard {index} of {count}: rows {start} to {end} of {len(entries)}")
    shard = Shard(index=index, count=count, start=start, end=end, total=len(entries), digest=digest_of(entries))
    kind = str(rest.get("type"))
    field = kind if kind in _ROWS else "items"
    kept = {name: value for name, value in rest.items() if name not in _SOURCE and name not in _ROWS}
    cut = {**kept, "type": kind if kind == field else "list", field: entries[start:end]}
    return replace(request, spec={**request.spec, "data": cut}), shard


def digest_of(entries: Sequence[Any]) -> str:
    """Return a digest of rows, in order: the same for the same rows on any machine."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps(entry, sort_keys=True, default=_stable).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _stable(value: Any) -> str:
    """Return a text for what JSON has no form of. That of an object of a library may name its address: its type is."""
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.sha256(value).hexdigest()
    module = type(value).__module__
    return str(value) if module in ("datetime", "decimal", "uuid") else type(value).__qualname__
