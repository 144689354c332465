"""The list of pipelines reads a chunk of them in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from gpuflow.gateway.pipelines import PREFIX, pipelines_router
from gpuflow.gateway.rights import keep_grant
from gpuflow.pipelines.records import PipelineRecord
from gpuflow.tokens.rights import Grant, Role

BEN = Grant(role=Role.VIEWER, owner="ben", token_id="1", digest="d")
COUNT = 500


class Pipelines:
    """Records of pipelines, every tenth of them ben's; counts the steps that read them."""

    def __init__(self) -> None:
        self.steps = 0

    def find(self, pipeline_id: str) -> PipelineRecord | None:
        return self.find_many([pipeline_id])[0]

    def find_many(self, ids: Sequence[str]) -> list[PipelineRecord | None]:
        self.steps += 1
        raw = {"state": "RUNNING", "template": "{}", "created_at": "1"}
        return [
            PipelineRecord.from_hashes({**raw, "id": one, "owner": "ana" if int(one[1:]) % 10 else "ben"}, {})
            for one in ids
        ]


def newest(_: str, highest: str, __: str, *, start: int, num: int, **___: bool) -> list[tuple[str, float]]:
    found = [(f"p{number:04}", float(number)) for number in range(COUNT, 0, -1) if number <= float(highest)]
    return found[start : start + num]


def test_a_list_reads_many_pipelines_at_once() -> None:
    pipelines = Pipelines()
    redis = SimpleNamespace(zrevrangebyscore=newest)
    app = SimpleNamespace(redis=redis, keys=SimpleNamespace(pipelines="pipelines"), pipelines=pipelines)

    async def run(call: Callable[[Any], Any]) -> Any:
        return await asyncio.to_thread(call, app)

    def admit(request: Request) -> None:
        keep_grant(request, BEN)

    front = FastAPI()
    front.include_router(pipelines_router(cast("Any", SimpleNamespace(run=run)), cast("Any", admit)))
    with TestClient(front) as http:
        found = http.get(PREFIX, params={"limit": 1000}).json()

    assert len(found["pipelines"]) == COUNT // 10
    assert pipelines.steps <= 4
