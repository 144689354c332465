"""A look at what a request reads while its model is being loaded: its mistakes are told at once. Runs in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executors.base import MERGED
from executors.data.sources import read_entries
from executors.sessions.lines import Open
from gpuflow.protocol import Emitter, Request


def check_input(request: Request, opening: Open, emitter: Emitter) -> None:
    """Raise ExecutorError: BadInput for data, or sampling, that no model could answer.

    The engine reads it once more when it is there. The children of a merged request are left to it, and what is in the
    request of a container only that knows.
    """
    if MERGED in request.spec or opening.engine == "container":
        return
    data: Mapping[str, Any] = request.spec.get("data") or {}
    entries = read_entries(data, request.cache_dir, emitter)
    if opening.task_type == "embedding":
        from executors.vectors.texts import read_texts

        read_texts(entries, data, "")
        return
    from executors.generation.parameters import read_sampling
    from executors.generation.prompts import read_prompts

    read_prompts(entries, data)
    if opening.engine == "transformers":
        read_sampling(request.spec.get("inference") or {})
