"""One request on an engine that is loaded for it alone: how vLLM answers where no session is kept.

Found by `registry` in a child that was started for vLLM. The transformers engine has executors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from executors import cancellation
from executors.base import Executor
from executors.merging import MergedChild, Result
from executors.sessions.children import answer_children
from executors.sessions.engine import SessionEngine, make_engine
from executors.sessions.leaving import end_descendants
from executors.sessions.lines import FAMILIES, Open
from executors.sessions.unused import unused, with_warnings
from gpuflow.protocol import Emitter, Request


class OneShotVllm(Executor):
    """Loads vLLM's engine, answers on it as a session does, and ends it."""

    task_types: ClassVar[tuple[str, ...]] = FAMILIES
    environment: ClassVar[str] = "vllm"

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Load the model, answer the prompts or texts, write the files and return the result value."""
        messages = unused(request.spec, engine="vllm", task_type=request.task_type)
        for message in messages:
            emitter.emit("log", message=message)
        result = self._on_engine(request, emitter, lambda engine, _: engine.run(request, emitter))
        return with_warnings(result, messages)

    def run_children(self, request: Request, children: Sequence[MergedChild], emitter: Emitter) -> dict[str, Result]:
        """Answer all children by one load of the model."""
        first = children[0].request  # what is common to all may stand in each child alone
        return self._on_engine(
            first, emitter, lambda engine, opening: answer_children(engine, opening, children, emitter)
        )

    def _on_engine(
        self,
        request: Request,
        emitter: Emitter,
        answer: Callable[[SessionEngine, Open], Coroutine[Any, Any, Result]],
    ) -> Result:
        opening = Open(
            spec=request.spec,
            engine="vllm",
            task_type=request.task_type,
            gpus=request.gpus,
            share_mib=request.share_mib,
            cache_dir=request.cache_dir,
            checkpoint_path=request.checkpoint_path,
        )
        with _loaded(opening, emitter) as engine:
            return cancellation.run_async(answer(engine, opening))


@contextmanager
def _loaded(opening: Open, emitter: Emitter) -> Iterator[SessionEngine]:
    """Load an engine in this thread, which is the one that a cancel ends; nothing of it is left after the block."""
    engine = make_engine(opening)
    try:
        engine.load(opening, emitter)
        yield engine
        engine.close()
    finally:
        end_descendants()
