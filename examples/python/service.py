"""gpuflow inside an asyncio service: several pipelines at once, their events as a stream, a deadline, a cancel.

    python examples/python/service.py       # with a fleet of its own; prints what each request came to

A service of yours keeps one app for all requests: `gpuflow.app` with REDIS_URL. `await run` holds no thread while it
waits. Calls that send or cancel are short and block, so they go through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gpuflow import GPUFlow, PipelineRun, TaskCancelled, TaskFailed, local_fleet, submit_pipeline


class Service:
    """Answers requests by pipelines."""

    def __init__(self, app: GPUFlow) -> None:
        self._app = app

    async def start(self, texts: Sequence[str], *, request_id: str, seconds: float = 0.0) -> PipelineRun:
        """Send a request; a client that sends it again, under the same id, gets the same run."""
        template = {
            "apiVersion": "gpuflow/v1",
            "metadata": {"name": "answer", "owner": "service"},
            "spec": {
                "taskType": "echo",
                "resources": {"accelerators": "cpu"},
                "stages": [
                    {"name": "read", "spec": {"data": {"items": list(texts)}}},
                    {
                        "name": "answer",
                        "spec": {"data": {"items": "${read.items.output}"}, "echo": {"sleep_seconds": seconds}},
                    },
                ],
            },
        }
        return await asyncio.to_thread(submit_pipeline, template, idempotency_key=request_id, app=self._app)

    async def answer(self, texts: Sequence[str], *, request_id: str, within: float, seconds: float = 0.0) -> list[Any]:
        """Return the answers. Raises TimeoutError after `within` seconds; the run is cancelled then."""
        run = await self.start(texts, request_id=request_id, seconds=seconds)
        try:
            await asyncio.wait_for(run, within)
        except (TimeoutError, asyncio.CancelledError):  # the deadline, or a client that has hung up
            await asyncio.to_thread(run.cancel)
            raise
        result = await asyncio.to_thread(lambda: run["answer"].result)
        return [item["output"] for item in (result or {})["items"]]

    async def progress(self, run: PipelineRun) -> AsyncIterator[str]:
        """Yield the states of the stages as they come, such as for server-sent events."""
        async for event in run.events():
            if event.name == "stage":
                yield f"{event.data['stage']}: {event.data['state']}"


async def serve(app: GPUFlow) -> None:
    """Play a morning of the service."""
    service = Service(app)
    requests = [service.answer([f"question {n}"], request_id=f"request-{n}", within=120) for n in range(8)]
    for number, answers in enumerate(await asyncio.gather(*requests)):
        print(f"request {number}: {answers}")
    watched = await service.start(["and this?"], request_id="watched")
    print("watched:", [line async for line in service.progress(watched)][-1])
    try:
        await service.answer(["a slow one"], request_id="slow", within=2, seconds=600)
    except TimeoutError:
        slow = await service.start(["a slow one"], request_id="slow", seconds=600)  # the same id: the same run
        try:
            await slow
        except TaskCancelled:
            print("slow: cancelled")
        except TaskFailed as error:
            print("slow: failed", error)


def main() -> None:
    """Start a fleet in a folder of its own and serve on it."""
    with tempfile.TemporaryDirectory(prefix="gpuflow-service-") as folder, local_fleet(folder) as app:
        asyncio.run(serve(app))


if __name__ == "__main__":
    main()
