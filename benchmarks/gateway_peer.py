"""The peer of benchmarks/gateway.py: a bare FastAPI app with one Redis write, and one XREAD loop for each reader."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

app = FastAPI()
client: Any = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True, max_connections=2000)


@app.post("/tasks", status_code=201)
async def submit(request: Request) -> dict[str, str]:
    """Write the body into one stream."""
    body = await request.body()
    await request.json()
    return {"id": await client.xadd("peer.submitted", {"spec": body})}


@app.get("/tasks/{id}/events")
async def events(id: str) -> StreamingResponse:
    """Give the events of a task as they come."""

    async def lines() -> AsyncIterator[str]:
        last = "0-0"
        while True:
            for _, found in await client.xread({f"events:{id}": last}, block=1000):
                for last, fields in found:
                    yield f"id: {last}\ndata: {fields['event']}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
