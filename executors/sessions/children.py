"""The children of a merged request, side by side on one engine; a bad one fails alone."""

from __future__ import annotations

from collections.abc import Sequence

from executors.merging import ChildEmitter, MergedChild, Result, failed
from executors.sessions.engine import Engine, EngineDied, together
from executors.sessions.lines import Opening
from executors.sessions.requests import check_model
from gpuflow.protocol import Emitter


async def answer_children(
    engine: Engine, opening: Opening, children: Sequence[MergedChild], emitter: Emitter
) -> dict[str, Result]:
    """Return the result of each child, or its error, by its id. Raises EngineDied: then there is none of any."""
    answers = await together([_answer(engine, opening, child, emitter) for child in children])
    return {child.id: answer for child, answer in zip(children, answers, strict=True)}


async def _answer(engine: Engine, opening: Opening, child: MergedChild, emitter: Emitter) -> Result:
    try:
        check_model(child.request, opening)
        return await engine.run(child.request, ChildEmitter(emitter, child.id))
    except EngineDied:
        raise
    except Exception as error:  # noqa: BLE001  (one bad child fails alone)
        return failed(error)
