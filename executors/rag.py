"""The task type `rag`: makes an index of documents, or answers questions with passages of one, and cites them.

With `index`, the documents of `data` become the folder final_index. Without, each question of `data` or `query` is
looked up in `search.index`, in `search.documents` or on a Qdrant server, and a model answers from what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from executors import task_access
from executors.base import Executor, bad_input, write_responses
from executors.retrieval.documents import open_documents
from executors.retrieval.index import Hit, Index, read_facts
from executors.retrieval.making import Making, probe_of
from executors.retrieval.prompting import (
    DEFAULT_CONTEXT_CHARACTERS,
    citations_of,
    context_of,
    messages_of,
    prompt_of,
    within_context,
)
from executors.retrieval.qdrant import Qdrant
from gpuflow.protocol import Emitter, Request

#: Folder of a result that is an index.
FINAL_INDEX: Final = "final_index"
#: Passages that are looked for where the task does not say.
DEFAULT_TOP_K: Final = 5


class Rag(Executor):
    """Makes an index of documents, or answers questions from one; items have input, output and citations."""

    task_types: ClassVar[tuple[str, ...]] = ("rag",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Make an index and describe it, or answer the questions; write responses.json and return the same."""
        is_ingest = request.spec.get("index") is not None
        result = _ingest(request, emitter) if is_ingest else _answer(request, emitter)
        write_responses(request, emitter, result)
        return result


def _ingest(request: Request, emitter: Emitter) -> dict[str, Any]:
    documents = open_documents(request.spec.get("data") or {}, request.cache_dir, emitter)
    model = _named_model(request)
    embedder = _load_embedder(model, request, emitter)
    emitter.status("working")
    making = Making(model=model, embedder=embedder, section=request.spec.get("embedding") or {})
    made = making.run(
        Path(request.output_dir) / FINAL_INDEX,
        documents,
        request.spec["index"].get("chunks"),
        lambda done, passages: emitter.progress(done, documents.count, "document", passages=passages),
    )
    emitter.artifact(FINAL_INDEX)
    return {
        FINAL_INDEX: FINAL_INDEX,
        "documents": made.documents,
        "blank_documents": made.blank_documents,
        "passages": made.passages,
        "truncated": made.truncated,
        "dimensions": made.dimension,
        "embedding_model": model,
        "usage": _usage(made.tokens),
    }


def _answer(request: Request, emitter: Emitter) -> dict[str, Any]:
    from executors.generation.parameters import read_sampling

    spec = request.spec
    read_sampling(spec.get("inference"))
    questions = _questions(request, emitter)
    found, about = _retrieve(request, [text for _, text in questions], emitter)
    limit = int((spec.get("search") or {}).get("context_characters") or DEFAULT_CONTEXT_CHARACTERS)
    hits = [within_context(one, limit) for one in found]
    if (spec.get("model") or {}).get("source") or request.checkpoint_path:
        return {**_generate(request, questions, hits, limit, emitter), "retrieval": about}
    items = []
    for index, ((given, question), passages) in enumerate(zip(questions, hits, strict=True)):
        context = context_of(passages, limit)
        items.append(
            {
                "index": index,
                "input": given,
                "output": context,
                "prompt": prompt_of(question, context),
                "citations": citations_of(passages),
            }
        )
    emitter.progress(len(items), len(items), "item")
    return {"items": items, "usage": _usage(about["prompt_tokens"]), "retrieval": about}


def _generate(
    request: Request,
    questions: Sequence[tuple[Any, str]],
    hits: Sequence[Sequence[Hit]],
    limit: int,
    emitter: Emitter,
) -> dict[str, Any]:
    from executors.generation.memory import free_unused
    from executors.generation.prompts import Prompt
    from executors.inference import answer

    free_unused()  # the model that has embedded the questions is gone
    inference: Mapping[str, Any] = request.spec.get("inference") or {}

    def prompts_for(tokenizer: Any) -> list[Prompt]:
        control = list(tokenizer.all_special_tokens)
        return [
            Prompt(
                index=index,
                given=given,
                messages=messages_of(question, context_of(passages, limit, control), inference),
            )
            for index, ((given, question), passages) in enumerate(zip(questions, hits, strict=True))
        ]

    result = answer(request, prompts_for, emitter)
    items = [
        {**item, "citations": citations_of(passages, item["output"])}
        for item, passages in zip(result["items"], hits, strict=True)
    ]
    return {**result, "items": items}


def _retrieve(request: Request, questions: Sequence[str], emitter: Emitter) -> tuple[list[list[Hit]], dict[str, Any]]:
    """Return the passages of each question, and what is said of the search in the result."""
    search: Mapping[str, Any] = request.spec.get("search") or {}
    top_k = int(search.get("top_k") or DEFAULT_TOP_K)
    threshold = search.get("score_threshold")
    if request.spec.get("qdrant"):
        server = Qdrant(request.spec["qdrant"])
        vectors, tokens = _vectors(request, questions, _load_embedder(_named_model(request), request, emitter), "")
        found = server.search([vector.tolist() for vector in vectors], top_k, threshold)
        return found, {"collection": server.collection, "prompt_tokens": tokens}
    if search.get("documents"):
        return _retrieve_in_place(request, questions, top_k, threshold, emitter)
    folder = _index_folder(search)
    facts = read_facts(folder)
    model = (request.spec.get("embedding") or {}).get("model") or facts.model
    index = Index.open(folder)
    embedder = _load_embedder(model, request, emitter, normalize=facts.normalize)
    index.check_model(probe_of(embedder), model)
    vectors, tokens = _vectors(request, questions, embedder, facts.query_prefix)
    return _looked_up(index, vectors, tokens, top_k, threshold)


def _retrieve_in_place(
    request: Request, questions: Sequence[str], top_k: int, threshold: float | None, emitter: Emitter
) -> tuple[list[list[Hit]], dict[str, Any]]:
    """Make an index of `search.documents`, which is not kept, and search it."""
    import tempfile

    search: Mapping[str, Any] = request.spec["search"]
    given = search["documents"]
    documents = open_documents(
        given if isinstance(given, Mapping) else {"type": "list", "items": given}, request.cache_dir, emitter
    )
    model = _named_model(request)
    embedder = _load_embedder(model, request, emitter)
    Path(request.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".index-", dir=request.output_dir) as work:
        folder = Path(work, "index")
        emitter.status("loading", f"making an index of {documents.count} documents")
        making = Making(model=model, embedder=embedder, section=request.spec.get("embedding") or {})
        making.run(folder, documents, search.get("chunks"), lambda *_: None)  # its progress is that of the answers
        vectors, tokens = _vectors(request, questions, embedder, "")
        return _looked_up(Index.open(folder), vectors, tokens, top_k, threshold)


def _looked_up(
    index: Index, vectors: Any, tokens: int, top_k: int, threshold: float | None
) -> tuple[list[list[Hit]], dict[str, Any]]:
    try:
        found = index.search(vectors, top_k, threshold)
    finally:
        index.close()
    about = {"passages": index.facts.passages, "embedding_model": index.facts.model, "prompt_tokens": tokens}
    return found, about


def _questions(request: Request, emitter: Emitter) -> list[tuple[Any, str]]:
    """Return each question as given and as text: the last message of a chat. Raises ExecutorError: BadInput."""
    from executors.data.sources import read_entries
    from executors.generation.prompts import read_prompts

    query = request.spec.get("query")
    data: Mapping[str, Any] = request.spec.get("data") or {}
    if query is not None:
        entries = list(query) if isinstance(query, list) else [query]
    else:
        entries = read_entries(data, request.cache_dir, emitter)
    found = []
    for prompt in read_prompts(entries, data):
        text = prompt.messages[-1]["content"]
        if not isinstance(text, str) or not text.strip():
            raise bad_input(f"question {prompt.index} has no text; give one")
        found.append((prompt.given, text))
    return found


def _index_folder(search: Mapping[str, Any]) -> Path:
    given = search.get("index")
    path = (given.get("path") if isinstance(given, Mapping) else given) or ""
    if not path:
        raise bad_input("the task has nothing to search; give search.index, search.documents or qdrant")
    folder = task_access.folder(str(path), "search.index")
    if not folder.is_dir():
        raise bad_input(f"{folder} is no folder on this machine; give final_index of a rag task as search.index")
    return folder


def _named_model(request: Request) -> str:
    name = (request.spec.get("embedding") or {}).get("model")
    if not name:
        raise bad_input("the task names no model for vectors; set embedding.model")
    return str(name)


def _load_embedder(name: str, request: Request, emitter: Emitter, *, normalize: bool | None = None) -> Any:
    """Load the model for vectors, which has nothing of `model`: that section is about the model that answers."""
    from executors.modeling.libraries import prepare_libraries

    prepare_libraries()
    from executors.sessions.lines import Open
    from executors.sessions.transformers_loading import named_source
    from executors.vectors.embedder import Embedder

    section = dict(request.spec.get("embedding") or {})
    if normalize is not None:
        section["normalize"] = normalize
    opening = Open(
        spec={"model": {"source": named_source(name)}, "embedding": section},
        engine="transformers",
        task_type="embedding",
        cache_dir=request.cache_dir,
    )
    return Embedder.load(opening, emitter)


def _vectors(request: Request, questions: Sequence[str], embedder: Any, prefix: str) -> tuple[Any, int]:
    """Return an array of float32, a row for each question, and the number of tokens."""
    import numpy

    given = (request.spec.get("embedding") or {}).get("query_prefix")
    prefix = prefix if given is None else str(given)
    done = [one for batch in embedder.embed([prefix + text for text in questions]) for one in batch]
    return numpy.stack([one.vector for one in done]).astype("float32"), sum(one.tokens for one in done)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
