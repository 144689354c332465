"""The OpenAPI document: complete, and held by the gateway whatever is sent (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import patient

_EXAMPLES = 20
PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def front(long_fleet: TestFleet) -> Iterator[Gateway]:
    """A gateway before a fleet without workers: what is submitted waits."""
    with Gateway(long_fleet.folder, env={"REDIS_URL": long_fleet.broker.url}) as started:
        yield started


@pytest.fixture(scope="module")
def document(front: Gateway) -> dict[str, Any]:
    return httpx.get(f"{front.url}/openapi.json", headers=front.headers, timeout=patient(30)).json()


@pytest.fixture
def schema(front: Gateway, document: dict[str, Any]) -> Any:
    import schemathesis  # here: it takes long to load, and every test process imports this module

    made = schemathesis.openapi.from_dict(document)
    made.config.update(base_url=front.url)
    return made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert operation.get("summary"), name
        assert operation.get("description"), name
        if "/api/" in name and "results" not in name:
            assert {"400", "401", "403", "429", "500", "503"} <= set(operation["responses"]), name
            assert all(answer.get("description") for answer in operation["responses"].values()), name
        for answer in ("400", "422"):
            content = operation["responses"].get(answer, {}).get("content", {})
            assert set(content) <= {"application/json" if "/v1/" in name and "/api/" not in name else PROBLEM}, name
    assert "ProblemShape" in document["components"]["schemas"]


@pytest.fixture
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_the_gateway_holds_to_it(schema: Any, checks: list[Any]) -> None:
    tried = 0
    for found in schema.exclude(path_regex="/results|/events$").get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def holds(case: Any) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=patient(30))
            case.validate_response(answer, checks=checks)

        holds()
        tried += 1
    assert tried >= 15
