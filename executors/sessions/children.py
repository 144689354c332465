"""The children of a merged request, side by side on one engine; a bad one fails alone."""

from __future__ import annotations

from collections.abc import Sequence

from executors.merging import ChildEmitter, MergedChild, Result, failed
from executors.sessions.engine import EngineDied, SessionEngine, together
from executors.sessions.lines import Open
from executors.sessions.requests import check_model
from executors.sessions.unused import unused, with_warnings
from gpuflow.protocol import Emitter


async def answer_children(
    engine: SessionEngine, opening: Open, children: Sequence[MergedChild], emitter: Emitter
) -> dict[str, Result]:
    """Return the result of each child, or its error, by its id. Raises EngineDied: then there is none of any."""
    answers = await together([_answer(engine, opening, child, emitter) for child in children])
    return {child.id: answer for child, answer in zip(children, answers, strict=True)}


async def _answer(engine: SessionEngine, opening: Open, child: MergedChild, emitter: Emitter) -> Result:
    request, told = child.request, ChildEmitter(emitter, child.id)
    try:
        check_model(request, opening)
        messages = unused(request.spec, engine=opening.engine, task_type=opening.task_type, loaded=opening.spec)
        for message in messages:
            told.emit("log", message=message)
        return with_warnings(await engine.run(request, told), messages)
    except EngineDied:
        raise
    except Exception as error:  # noqa: BLE001  (one bad child fails alone)
        return failed(error)
