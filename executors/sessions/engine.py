"""What every engine of a session is: loads one model once, then answers requests side by side.

`serving` calls it from its event loop. An engine knows neither stdin nor ids: it is given a request and an emitter that
tells the events of that request alone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from executors.base import ExecutorError
from executors.sessions.lines import Open
from gpuflow.protocol import Emitter, Request

T = TypeVar("T")


class EngineDied(ExecutorError):
    """The engine is gone or cannot go on: the session ends, and its requests are for another one."""

    def __init__(self, message: str) -> None:
        super().__init__("EngineDied", message, retryable=True)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What has been loaded. `max_requests` is how many answers the engine works on at once.

    `idle_seconds` and `lifetime_seconds` are limits of its own, see docs/reference/sessions.md.
    """

    model: str
    revision: str | None
    max_requests: int
    idle_seconds: float | None = None
    lifetime_seconds: float | None = None


class SessionEngine(ABC):
    """One loaded model. `load` is called once, in a thread; all else from the event loop."""

    name: str

    @abstractmethod
    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Load the model of the opening, telling of it. Raises ExecutorError, or anything else, for a failure."""

    @abstractmethod
    async def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Answer a request, write its files and return the result value.

        A cancelled call ends the work of this request alone. Raises ExecutorError; EngineDied where the engine is gone.
        """

    @property
    @abstractmethod
    def running(self) -> int:
        """How many of the calls of `run` the engine works on now; the others wait."""

    def check(self) -> None:  # noqa: B027  (most engines cannot be gone)
        """Raise EngineDied if the engine is gone. Costs nothing: it is called often."""

    def close(self) -> None:  # noqa: B027  (there may be nothing to free)
        """Free what the engine holds. The process ends after it, and kills what is left."""


def make_engine(opening: Open) -> SessionEngine:
    """Return the engine that the opening asks for, not loaded yet."""
    if opening.engine == "vllm":
        from executors.sessions.vllm_engine import VllmEngine

        return VllmEngine(opening.task_type)
    if opening.engine == "container":
        from executors.containers.session import ContainerSessionEngine

        return ContainerSessionEngine()
    from executors.sessions.transformers_engine import TransformersEngine

    return TransformersEngine(opening.task_type)


async def together(answers: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all and return what they give; the first failure, or a cancel, ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
