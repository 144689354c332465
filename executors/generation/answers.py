"""From the rows of a batch to what is told of them: deltas, items, token counts. Pure but for the size of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executors.generation.parameters import Sampling
from executors.generation.prompts import Prompt
from executors.generation.rows import Row
from executors.sessions.unused import with_warnings
from gpuflow.protocol import Emitter


def batch_size(inference: Mapping[str, Any], sampling: Sampling) -> int:
    """Return how many prompts go through the model at once: the task's `batch_size`, or what suits the device."""
    return max(1, int(inference.get("batch_size") or default_rows()) // sampling.n)


def batches(room: Sequence[bool], size: int) -> Iterator[range]:
    """Yield the numbers of prompts that go through the model together, in order, up to `size` of them.

    `room` says of each prompt whether it leaves room for a whole answer: one that does not would cut the answers of the
    others, so it goes alone.
    """
    start = 0
    while start < len(room):
        end = start + 1
        while room[start] and end < len(room) and room[end] and end - start < size:
            end += 1
        yield range(start, end)
        start = end


def default_rows() -> int:
    """Return how many rows go through the model at once where the task does not say: what suits the device."""
    import torch

    return 32 if torch.cuda.is_available() else 8


def tell_deltas(rows: Sequence[Row], prompt: Prompt, emitter: Emitter) -> None:
    """Tell what is new of the rows (samples) of one prompt."""
    for sample, row in enumerate(rows):
        delta = row.take_delta()
        if delta:
            extra = {"sample": sample} if len(rows) > 1 else {}
            emitter.emit("text_delta", delta=delta, request=prompt.index, **extra)


def item_of(prompt: Prompt, rows: Sequence[Row], prompt_tokens: int) -> dict[str, Any]:
    """Return the item of one answered prompt."""
    item = {
        "index": prompt.index,
        **prompt.shown,
        "output": rows[0].text,
        "finish_reason": rows[0].finish_reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": sum(row.tokens for row in rows)},
    }
    if len(rows) > 1:
        item["outputs"] = [row.text for row in rows]
        item["finish_reasons"] = [row.finish_reason for row in rows]
    return item


def result_of(
    items: Sequence[Mapping[str, Any]],
    model: str,
    engine: str = "transformers",
    *,
    inference: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result value of answered items; `engine` is the one that ran. Answers that `inference` gives a
    structure, and that ended before it was whole, are counted in its warnings.
    """
    prompt_tokens = sum(item["usage"]["prompt_tokens"] for item in items)
    completion_tokens = sum(item["usage"]["completion_tokens"] for item in items)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    result = {"items": list(items), "usage": usage, "model": model, "engine": engine}
    if (inference or {}).get("structured_outputs") is None:
        return result
    reasons = [item.get("finish_reasons") or [item.get("finish_reason")] for item in items]
    cut = sum(reason == "length" for found in reasons for reason in found)
    messages = [
        f"{cut} of {sum(map(len, reasons))} answers ended at max_tokens, or at the end of the model's context, before "
        "their structure was whole (finish_reason: length), and may not parse; raise inference.max_tokens"
    ]
    return with_warnings(result, messages) if cut else result
