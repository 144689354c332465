"""The lines that other systems' documents have for curl, adapted in host, port, token and ids alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

CREATE = """curl -s -X POST http://localhost:8001/api/admin/workers \\
  -H "Authorization: Bearer $ADMIN_TOKEN" \\
  -H "Content-Type: application/json" \\
  -d '{
    "name": "gpu-worker-1",
    "worker_type": "persistent",
    "labels": {"location": "datacenter-a", "gpu_type": "a100"}
  }'"""
SUBMITS = (
    """curl -s -X POST http://localhost:8001/api/queue/submit \\
  -H "Content-Type: application/json" \\
  -d '{
    "config_name": "quickstart",
    "target": "worker"
  }'""",
    """curl -s -X POST http://localhost:8001/api/queue/submit \\
  -H "Content-Type: application/json" \\
  -d '{
    "config_name": "quickstart",
    "target": "worker",
    "worker_labels": {"gpu_type": "a100*"}
  }'""",
    """curl -s -X POST http://localhost:8001/api/queue/submit \\
  -d '{"config_name": "quickstart", "worker_labels": {"team": "nlp"}}'""",
)
LIST = "curl -s http://localhost:8001/api/admin/workers"
DRAIN = "curl -s -X POST http://localhost:8001/api/admin/workers/w_abc123/drain"
ROTATE = "curl -s -X POST http://localhost:8001/api/admin/workers/w_abc123/token"
DELETE = "curl -s -X DELETE http://localhost:8001/api/admin/workers/w_abc123"
ALL = "curl http://localhost:3000/api/workers"
ONE = "curl http://localhost:3000/api/workers/worker-1"
HEALTH = "curl http://localhost:3000/health"

PREFIX = {"GPUFLOW_KEY_PREFIX": "team1:"}


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """Yield a fleet with a prefix of its own, as tokens of workers need it."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), env=PREFIX, options=("--without-mingle",))
    yield made
    made.close()


@pytest.fixture
def gateway(fleet: TestFleet) -> Iterator[Gateway]:
    with Gateway(fleet.folder, env={"REDIS_URL": fleet.broker.url, **PREFIX}, root=fleet.results) as started:
        yield started


def sent(gateway: Gateway, line: str, worker: str = "") -> httpx.Response:
    """Send what curl sends for this line; `worker` stands for the id of the documents' worker."""
    words = shlex.split(line.replace("w_abc123", worker))[1:]
    method, url, headers, body = "GET", "", {"Accept": "*/*", "User-Agent": "curl/8.5.0", **gateway.headers}, None
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers |= {} if name == "Authorization" else {name: value}
        elif word == "-d":
            body = words.pop(0)
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        elif word.startswith("http"):
            url = f"{gateway.url}/" + word.split("/", 3)[3]
    return httpx.request(method, url, headers=headers, content=body, timeout=patient(30))


def test_a_worker_from_its_token_to_its_end(gateway: Gateway, fleet: TestFleet) -> None:
    made = sent(gateway, CREATE)
    assert made.status_code == 201, made.text
    worker = made.json()["id"]
    assert made.json()["token"].startswith("wt_") and made.json()["type"] == "persistent"
    (listed,) = sent(gateway, LIST).json()["workers"]
    assert (listed["id"], listed["name"]) == (worker, "gpu-worker-1")
    assert listed["labels"] == {"location": "datacenter-a", "gpu_type": "a100"}

    rotated = sent(gateway, ROTATE, worker)
    assert rotated.status_code == 201, (made.json(), rotated.text)
    assert rotated.json()["token"] != made.json()["token"]

    started = fleet.start_worker("gpu-worker-1")
    assert sent(gateway, DRAIN, worker).status_code == 200
    eventually(lambda: started.process.poll() is not None, within=30, what="the end of the drained worker")
    assert sent(gateway, DELETE, worker).status_code == 204
    assert sent(gateway, LIST).json()["workers"] == []


@pytest.mark.parametrize("line", SUBMITS)
def test_configurations_are_submitted(gateway: Gateway, line: str) -> None:
    told = sent(gateway, line)

    assert told.status_code == 201, told.text
    run = httpx.get(gateway.url + told.json()["url"], headers=gateway.headers, timeout=patient(30)).json()
    assert run["name"] == "quickstart", json.dumps(run)[:300]


def test_workers_are_shown(gateway: Gateway, fleet: TestFleet) -> None:
    fleet.start_worker("worker-1")

    assert [one["id"] for one in sent(gateway, ALL).json()["workers"]] == ["worker-1"]
    assert sent(gateway, ONE).json()["id"] == "worker-1"
    assert sent(gateway, HEALTH).status_code == 200
