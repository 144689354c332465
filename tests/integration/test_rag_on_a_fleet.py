"""Retrieval on machines that share no disk: a folder is sent, one makes the index, the other loads it and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit_pipeline
from tests.fixtures.fake_qdrant import fake_qdrant
from tests.fixtures.tiny_model import make_tiny_model
from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import patient

pytestmark = pytest.mark.ml

KEY = "canary-key-of-the-fleet-tests"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    folder = tmp_path / "gateway"
    folder.mkdir()
    with Gateway(folder) as made:
        yield made


def test_an_index_travels_and_the_key_of_a_server_does_not(fleet: TestFleet, tmp_path: Path, gateway: Gateway) -> None:
    model = make_tiny_model(tmp_path / "model")
    store = {"GPUFLOW_STORE_URL": gateway.results_url, "GPUFLOW_WORKER_TOKEN": TOKEN}
    for name in ("one", "two"):
        folders = {"RESULTS_DIR": str(tmp_path / name), "GPUFLOW_CACHE_DIR": str(tmp_path / f"{name}-cache")}
        fleet.spawn_worker(name, "--label", f"box={name}", env={**folders, **store, "QDRANT_API_KEY": KEY})
    home = tmp_path / "home"
    (home / "docs" / "sub").mkdir(parents=True)
    (home / "docs" / "cars.md").write_text("# Cars\n\nThe red car is here.\n")
    (home / "docs" / "sub" / "lamps.md").write_text("# Lamps\n\nThe green lamp is over there.\n")
    (home / "pipeline.json").write_text(json.dumps(_pipeline(model, "http://127.0.0.1:1")))
    settings = fleet.settings.load(
        env={"REDIS_URL": fleet.broker.url, "RESULTS_DIR": str(home / "r"), **store}, cwd=home
    )
    app = GPUFlow("client", settings=settings)
    points = [{"id": 1, "vector": [0.5] * 128, "payload": {"text": "found by the server"}}]
    with fake_qdrant(collections={"demo": {"size": 128, "points": points}}, key=KEY) as server:
        (home / "pipeline.json").write_text(json.dumps(_pipeline(model, server.url)))
        run = submit_pipeline(home / "pipeline.json", app=app).wait(timeout=patient(180))

    made, answered, asked = (run[name].result for name in ("make", "ask", "server"))
    assert (made["documents"], made["passages"]) == (2, 2)
    assert made["final_index_archive_url"].startswith(gateway.results_url)
    (item,) = answered["items"]
    assert {one["source"] for one in item["citations"]} == {"cars.md", "sub/lamps.md"}
    assert answered["usage"]["completion_tokens"] == 2
    assert list((tmp_path / "two-cache" / "checkpoints").glob("*/final_index/index.faiss")) or list(
        (tmp_path / "two-cache" / "checkpoints").glob("*/**/index.faiss")
    )
    assert asked["items"][0]["citations"][0]["text"] == "found by the server"
    assert server.seen[0]["headers"]["api-key"] == KEY
    for name in ("make", "ask", "server"):
        (task,) = run.record().stages[name].tasks
        assert KEY not in repr([event.data for event in fleet.app.event_log.read(task)])
    kept = [path for folder in ("one", "two", "gateway") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not [path for path in kept if KEY.encode() in path.read_bytes()]
    app.backend.result_consumer.subscribed_to.clear()
    app.close()
    app.redis.close()


def _pipeline(model: Path, qdrant: str) -> dict[str, Any]:
    embedding = {"model": str(model)}
    make = {
        "index": {"chunks": {"unit": "characters", "size": 40, "overlap": 0}},
        "data": {"upload": "./docs"},
        "embedding": embedding,
        "resources": {"accelerators": "cpu", "labels": {"box": "one"}},
    }
    ask = {
        "search": {"index": "${make.result.final_index_archive_url}", "top_k": 2},
        "query": "Where is the red car?",
        "model": {"source": {"type": "local", "identifier": str(model)}},
        "inference": {"max_tokens": 2, "temperature": 0, "system_prompt": "Answer.", "ignore_eos": True},
        "resources": {"accelerators": "cpu", "labels": {"box": "two"}},
    }
    server = {
        "qdrant": {"url": qdrant, "collection": "demo", "api_key": "${env:QDRANT_API_KEY}"},
        "secrets": ["QDRANT_API_KEY"],
        "embedding": embedding,
        "query": "x",
        "resources": {"accelerators": "cpu", "labels": {"box": "one"}},
    }
    stages = [
        {"name": "make", "spec": make},
        {"name": "ask", "dependsOn": ["make"], "spec": ask},
        {"name": "server", "dependsOn": ["make"], "spec": server},
    ]
    return {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "spec": {"taskType": "rag", "graph": {"nodes": stages}}}
