"""`GET /metrics`: the counts of the merge layer, behind the gateway's token."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gpuflow.client import submit
from tests.integration.gateway.test_results_service import problem
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually


def values(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_merged_calls_are_counted_for_prometheus(fleet: TestFleet, tmp_path: Path) -> None:
    spec = {"taskType": "echo", "echo": {"output": 1}, "merge": "always"}
    for _ in range(3):
        submit(spec, app=fleet.app)
    submit({**spec, "echo": {"output": 2}}, app=fleet.app)

    with Gateway(tmp_path, env={"REDIS_URL": fleet.broker.url}) as gateway:
        answer = httpx.get(f"{gateway.url}/metrics", headers=gateway.headers)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        found = values(answer.text)
        assert found["gpuflow_merge_calls_total"] == 4
        assert found["gpuflow_merge_runs_total"] == 1
        assert found["gpuflow_merge_coalesced_total"] == 2
        assert found["gpuflow_merge_batched_total"] == 1
        assert found["gpuflow_merge_kept_results"] == 0
        assert httpx.get(f"{gateway.url}/metrics").status_code == 401
        fleet.broker.kill()

        def refusal() -> httpx.Response | None:
            answer = httpx.get(f"{gateway.url}/metrics", headers=gateway.headers)
            return answer if answer.status_code == 503 else None  # the last answer is given for a moment

        away = eventually(refusal, within=15, what="an answer without the broker")
        assert problem(away) == "broker-away"
        assert "redis://" not in away.text

        # Then its log names the cause, once, and says when it is over
        for _ in range(3):
            assert httpx.get(f"{gateway.url}/api/v1/tasks/x", headers=gateway.headers).status_code == 503
        fleet.broker.restart()

        def served() -> bool:
            return httpx.get(f"{gateway.url}/metrics", headers=gateway.headers).status_code == 200

        eventually(served, within=15, what="the metrics again")
        assert gateway.log.count("event=broker_lost cause=") == 1 and "onnect" in gateway.log
        assert gateway.log.count("event=broker_is_back") == 1


def test_a_gateway_without_a_broker_says_so(gateway: Gateway) -> None:
    answer = httpx.get(f"{gateway.url}/metrics", headers=gateway.headers)
    assert (answer.status_code, problem(answer)) == (503, "no-broker")
