"""A task does not choose where its engine sends traces."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.policy.engine_traces import refusal


@pytest.mark.parametrize(
    "vllm",
    [
        {"otlp_traces_endpoint": "http://somewhere:4318"},
        {"otlp-traces-endpoint": "${env:X}"},
        {"OTLP_TRACES_ENDPOINT": "grpc://x"},
        {"collect_detailed_traces": ["all"]},
    ],
)
def test_an_endpoint_of_the_task_is_refused(vllm: dict[str, Any]) -> None:
    found = refusal({"taskType": "inference", "model": {"vllm": vllm}})

    assert found is not None
    assert found.path.startswith("model.vllm.") and found.message.startswith(found.path)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": None},
        {"model": {"vllm": []}},
        {"model": {"vllm": {"max_model_len": 512, "otlp_traces_endpoint": None}}},
        {"echo": {"otlp_traces_endpoint": "http://x"}},
    ],
)
def test_other_specs_are_not(spec: dict[str, Any]) -> None:
    assert refusal(spec) is None
