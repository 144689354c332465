"""The task type `acme.wordcount`: counts the words of every text of `data`.

taskType: acme.wordcount
data: {type: list, items: [...]}      # or any other data section: csv, jsonl, a data set of the hub
parameters: {top: 3, lower: true}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from executors.base import Executor, bad_input, write_responses
from executors.data.sources import read_entries
from gpuflow.protocol import Emitter, Request


class WordCount(Executor):
    """Counts the words of every text; the result holds the most frequent ones of each."""

    task_types: ClassVar[tuple[str, ...]] = ("acme.wordcount",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Check the request, count text by text, write responses.json and return the counts."""
        parameters: Mapping[str, Any] = request.spec.get("parameters") or {}
        top, lower = parameters.get("top", 3), bool(parameters.get("lower", True))
        if not isinstance(top, int) or top < 1:
            raise bad_input(f"parameters.top is {top!r}; give a count from 1 up")
        texts = read_entries(request.spec.get("data") or {}, request.cache_dir, emitter)
        # A model would be loaded here, after emitter.status("loading"); import its libraries inside this function.
        emitter.status("working")
        items = []
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise bad_input(f"data item {index} is {type(text).__name__}; give a text")
            words = (text.lower() if lower else text).split()
            items.append({"index": index, "input": text, "output": dict(Counter(words).most_common(top))})
            emitter.progress(index + 1, len(texts), "text")
        result = {"items": items}
        write_responses(request, emitter, result)
        return result
