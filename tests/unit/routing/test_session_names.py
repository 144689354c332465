"""Names of sessions: tasks of one name can be answered by one engine."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.protocol import Request
from gpuflow.routing.session_names import session_name


def spec_of(*, adapters: Any = None, **fields: Any) -> dict[str, Any]:
    model = {"source": {"identifier": "org/model"}, **({"adapters": adapters} if adapters else {})}
    return {"taskType": "inference", "model": model, **fields}


PLAIN = session_name(spec_of())
ONE, OTHER = [{"path": "/one"}], [{"path": "/other"}]
OF_ONE = {"checkpoint": {"load": "task-1"}}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(adapters=ONE),
        spec_of(**OF_ONE),
        spec_of(checkpoint={"load": "task-2"}),
        spec_of(adapters=ONE, **OF_ONE),
        spec_of(taskType="embedding"),
        spec_of(engine="vllm"),
    ],
)
def test_what_is_loaded_otherwise_has_another_name(spec: dict[str, Any]) -> None:
    others = [spec_of(), spec_of(adapters=ONE), spec_of(**OF_ONE), spec_of(checkpoint={"load": "task-2"})]
    assert [session_name(other) for other in others if other != spec].count(session_name(spec)) == 0


def test_what_each_request_brings_along_is_not_in_the_name() -> None:
    assert session_name(spec_of(adapters=ONE)) == session_name(spec_of(adapters=OTHER))
    assert session_name(spec_of(inference={"seed": 1}, checkpoint={"save": True})) == PLAIN
    assert session_name({"taskType": "sft", "model": spec_of()["model"]}) == ""


def container(request: Any = 1, *, env: Any = None, **section: Any) -> dict[str, Any]:
    return {"taskType": "container", "container": {"preset": "p", "request": request, **section}, "env": env}


def test_requests_to_one_container_have_one_name() -> None:
    name = session_name(container())

    assert name
    assert session_name(container({"other": "request"}, metrics={"a": "(.)"})) == name
    others = [
        container(env={"A": "b"}),
        container(env_vars={"A": "b"}),
        container(workdir="/x"),
        {**container(), "secrets": ["A"]},
    ]
    assert len({name, *(session_name(other) for other in others), session_name(container(), ["gpu"])}) == 6


def test_a_container_without_a_request_is_answered_by_no_session() -> None:
    assert session_name(container(None)) == ""
    assert session_name({"taskType": "container", "container": {"image": "a:1"}}) == ""


def test_a_request_says_how_much_of_a_gpu_is_its_own() -> None:
    request = Request(task_id="t", task_type="echo", spec={}, output_dir="o", share_mib=4096)

    assert Request.from_json(request.to_json()) == request
    old = request.to_json().replace('"share_mib": 4096, ', "")
    assert Request.from_json(old).share_mib is None
