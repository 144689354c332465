"""`training.nproc_per_node` against the GPUs that a task asks for."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import canonical, parse
from gpuflow.spec.ranks import most_gpus

BASE = {"taskType": "sft", "model": {"source": {"identifier": "example/base"}}, "data": {"items": ["a"]}}


def spec(resources: Any, **training: Any) -> dict[str, Any]:
    return {**BASE, "training": training, **({"resources": resources} if resources is not None else {})}


@pytest.mark.parametrize(
    ("resources", "most"),
    [
        ({"accelerators": "A100:2"}, 2),
        ({"accelerators": "A100-80GB:2"}, 2),
        ({"accelerators": "80GB+:1..4"}, 4),
        ({"accelerators": "A100"}, 1),
        ({"accelerators": "2"}, 2),
        ({"accelerators": 4}, 4),
        ({"accelerators": "40GB:0.5"}, 1),
        ({"accelerators": "cpu"}, 0),
        ({"accelerators": ["H100:1", "40GB+:3"]}, 3),
        ({"accelerators": {"A100": 2, "L4": 1}}, 2),
        ({"accelerators": "A100:${count}"}, None),
        ({"hardware": {"gpu": {"count": 2, "type": "any"}}}, 2),
        ({"hardware": {"gpu": {"count": "1..4"}}}, 4),
        ({"hardware": {"gpu": {"type": "a100"}}}, 1),
        ({"hardware": {"gpu": {"count": 0}}}, 0),
        ({"hardware": {"cpu": 8}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_most_gpus_that_a_task_may_have(resources, most):
    assert most_gpus(resources) == most


@pytest.mark.parametrize(
    ("resources", "training"),
    [
        ({"accelerators": "A100:2"}, {"nproc_per_node": 2}),
        ({"accelerators": ["H100:1", "A100:2"]}, {"nproc_per_node": 2}),
        ({"hardware": {"gpu": {"count": 0}}}, {"nproc_per_node": 2}),
        ({"accelerators": "cpu"}, {"nproc_per_node": 4}),
        (None, {"nproc_per_node": 2}),
        ({"accelerators": "A100:2"}, {"nproc_per_node": 1, "allow_multi_gpu": False}),
        ({"accelerators": "A100:2"}, {"nproc_per_node": None}),
    ],
)
def test_what_may_work_is_taken(resources, training):
    assert canonical(spec(resources, **training))["training"] == training


@pytest.mark.parametrize(
    ("resources", "training", "says"),
    [
        ({"accelerators": "A100:2"}, {"nproc_per_node": 3}, "is 3, but resources asks for at most 2 GPUs; ask for 3"),
        ({"accelerators": "A100"}, {"nproc_per_node": 2}, "at most 1 GPU;"),
        ({"hardware": {"gpu": {"count": "1..2"}}}, {"nproc_per_node": 4}, "at most 2 GPUs"),
        (None, {"nproc_per_node": 2, "allow_multi_gpu": False}, "allow_multi_gpu is false; keep one of both"),
    ],
)
def test_what_can_never_work_is_refused(resources, training, says):
    with pytest.raises(InvalidTemplate) as caught:
        canonical(spec(resources, **training))

    assert "training.nproc_per_node" in str(caught.value)
    assert says in str(caught.value)


def test_gpus_that_would_idle_are_told():
    def told(count, **training):
        template = parse({"apiVersion": "gpuflow/v1", "spec": spec({"accelerators": f"A100:{count}"}, **training)})
        return [one.message for one in template.warnings]

    assert "trains on one" in told(2, allow_multi_gpu=False)[0]
    assert told(1, allow_multi_gpu=False) == told(2, allow_multi_gpu=True) == []
