"""The task type `embedding`: one vector for each text of `data`, with a transformers model, and responses.json."""

from __future__ import annotations

from typing import Any, ClassVar

from executors.base import Executor, write_responses
from gpuflow.protocol import Emitter, Request


class Embedding(Executor):
    """Embeds every text of `data`; the result holds items (input, embedding), usage, dimensions, model, engine."""

    task_types: ClassVar[tuple[str, ...]] = ("embedding",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Read the texts, load the model, embed batch by batch, write the vectors and return them."""
        from executors.data.sources import read_entries
        from executors.modeling.libraries import prepare_libraries
        from executors.vectors.texts import read_texts

        data = request.spec.get("data") or {}
        given = request.spec.get("embedding") or {}
        texts = read_texts(read_entries(data, request.cache_dir, emitter), data, given.get("query_prefix") or "")
        prepare_libraries()

        from executors.sessions.adapter_switch import AdapterSwitch
        from executors.sessions.adapters import adapters_of
        from executors.sessions.lines import Open
        from executors.sessions.unused import unused
        from executors.vectors.embedder import Embedder
        from executors.vectors.results import item_of, vectors_result

        for message in unused(request.spec, engine="transformers", task_type="embedding"):
            emitter.emit("log", message=message)
        opening = Open(
            spec=request.spec,
            engine="transformers",
            task_type="embedding",
            cache_dir=request.cache_dir,
            checkpoint_path=request.checkpoint_path,
        )
        embedder = Embedder.load(opening, emitter)
        emitter.status("working")
        items: list[dict[str, Any]] = []
        with AdapterSwitch(embedder.model, headless=True).using(adapters_of(request)) as tuned:
            for batch in embedder.embed([text.text for text in texts], tuned):
                for one in batch:
                    items.append(item_of(texts[len(items)], one.vector, one.tokens, cut=one.cut))
                emitter.progress(len(items), len(texts), "item")
        result = vectors_result(items, embedder.name, "transformers", request, emitter)
        write_responses(request, emitter, result)
        return result
