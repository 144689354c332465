"""From the `resources` of a template to requirements."""

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.queue_names import queue_name
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import requirement_from_resources


def names(resources, gpu_available=True):
    return [queue_name(ask) for ask in requirement_from_resources(resources, gpu_available)]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (None, ["gpu"]),
        ({}, ["gpu"]),
        ("A100:2", ["gpu-a100-x2"]),
        ({"accelerators": "A100-80GB:2"}, ["gpu-a100-80g-x2"]),
        ({"accelerators": ["H100:1", "40GB+:1", "cpu"]}, ["gpu-h100", "gpu-40g", "cpu"]),
        ({"accelerators": []}, ["gpu"]),
        ({"hardware": {"cpu": "8", "memory": "32Gi"}}, ["cpu-8c-ram32g"]),
        ({"hardware": {"cpu": 2, "memory": "16GB"}}, ["cpu-2c-ram15259m"]),
        ({"hardware": {"cpu": "500m"}}, ["cpu-500mc"]),
        ({"hardware": {"gpu": {"type": "any", "count": 1, "memory": "46Gi"}}}, ["gpu-46g"]),
        ({"hardware": {"gpu": {"type": "a100*", "count": 2, "memory": "40Gi"}}}, ["gpu-a100+-40g-x2"]),
        ({"hardware": {"gpu": {"type": "nvidia-a100-80gb"}}}, ["gpu-a100-80g"]),
        ({"hardware": {"gpu": {"type": "A100", "memory": "80GB", "count": "1"}}}, ["gpu-a100-80g"]),
        ({"hardware": {"gpu": {"type": ["a100", "h100"]}}}, ["gpu-a100_h100"]),
        ({"hardware": {"gpu": {"count": 0}}}, ["cpu"]),
        ({"hardware": {"gpu": {}}}, ["gpu"]),
        ({"hardware": {"gpu": {"shared": True, "memory": "8GB"}}}, ["gpu-shared8g"]),
        ({"hardware": {"gpu": {"fraction": 0.5}}}, ["gpu-share50"]),
        ({"hardware": {"gpu": {"gpu_memory_fraction": 0.5}}}, ["gpu-share50"]),
        ({"hardware": {"gpu": {"fraction": 0.5, "shared": True}}}, ["gpu-share50"]),
        ({"hardware": {"gpu": {"fraction": 1}}}, ["gpu"]),
        ({"hardware": {"gpu": {"fraction": 0.125, "memory": "24GB"}}}, ["gpu-24g-share125m"]),
        ({"hardware": {"gpu": {"compute_capability": "8.0+"}}}, ["gpu-cc80"]),
        ({"hardware": {"gpu": {"compute_capability": ">=8.9", "type": "L4"}}}, ["gpu-l4-cc89"]),
        ({"hardware": {"gpu": {"compute_capability": 10.0, "count": 2}}}, ["gpu-x2-cc100"]),
        ({"hardware": {"gpu": {"memory": "24GB..80GB", "count": "1..4"}}}, ["gpu-24g-max80g-x1to4"]),
        ({"hardware": {"gpu": {"name": "A100", "memory": "80GB"}}}, ["gpu-a100-80g"]),
        ({"hardware": {"disk": "100Gi"}}, ["cpu-disk100g"]),
        ({"hardware": {"disk": "1TB", "gpu": {}}}, ["gpu-disk953675m"]),
        ({"gpu": "A100:80GB:2"}, ["gpu-a100-80g-x2"]),
        ({"gpu": {"name": "A100", "count": 2}}, ["gpu-a100-x2"]),
        (
            {
                "accelerators": ["L4:1", "16GB", "cpu"],
                "hardware": {"gpu": {"shared": False, "compute_capability": "8.0"}},
            },
            ["gpu-l4-cc80", "gpu-16g-cc80", "cpu"],
        ),
        ({"accelerators": "8GB", "hardware": {"gpu": {"shared": True}}}, ["gpu-shared8g"]),
        ({"labels": {"team": "nlp"}}, ["gpu.team=nlp"]),
        ({"labels": {"fast": None, "nvlink": True}}, ["gpu.fast.nvlink=true"]),
        ({"labels": ["fast"]}, ["gpu.fast"]),
        ({"replicas": 3}, ["gpu"]),
        ({"accelerators": "A100:1", "hardware": {"gpu": {"type": "a100"}, "cpu": 4}}, ["gpu-a100-4c"]),
        (
            {"accelerators": ["A100:1", "H100:1"], "labels": {"x": "1"}, "hardware": {"cpu": 4}},
            ["gpu-a100-4c.x=1", "gpu-h100-4c.x=1"],
        ),
    ],
)
def test_asks(resources, expected):
    assert names(resources) == expected


def test_without_a_gpu_in_the_fleet_an_open_ask_is_for_cpu():
    assert names(None, gpu_available=False) == ["cpu"]
    assert names({"labels": {"team": "nlp"}}, gpu_available=False) == ["cpu.team=nlp"]
    assert names({"accelerators": "A100"}, gpu_available=False) == ["gpu-a100"]


def test_spellings_of_one_ask_land_in_one_queue():
    spellings = [
        "A100-80GB:1",  # SkyPilot
        "A100:80GB:1",  # dstack
        "80GB+:a100",
        {"accelerators": {"A100-80GB": 1}},
        {"hardware": {"gpu": {"type": "nvidia-a100-80gb", "count": 1}}},  # FlowMesh
        {"hardware": {"gpu": {"type": "A100", "count": 1, "memory": "80Gi"}}},
        {"hardware": {"gpu": {"type": "a100", "memory": "80GB+"}}},
    ]
    assert {name for spelling in spellings for name in names(spelling)} == {"gpu-a100-80g"}


@pytest.mark.parametrize(
    ("resources", "fragments"),
    [
        (
            {"accelerators": "A100:1", "hardware": {"gpu": {"type": "h100"}}},
            ["'A100:1'", "h100:1", "keep one"],
        ),
        ({"accelerators": "A100:1", "hardware": {"gpu": {"count": 0}}}, ["'A100:1'", "cpu"]),
        ({"hardware": {"gpu": {"type": "a100-80gb", "memory": "40GB"}}}, ["a100-80gb", "40GB"]),
        ({"hardware": {"gpu": {"type": "a100:2"}}}, ["a100:2"]),
        ({"hardware": {"gpu": {"type": ["a100-80gb", "h100"]}}}, ["fields"]),
        ({"hardware": {"gpu": {"memory": "40"}}}, ["hardware.gpu.memory", "40GB"]),
        ({"hardware": {"gpu": {"memory": 40}}}, ["hardware.gpu.memory", "40GB"]),
        ({"hardware": {"gpu": {"count": -1}}}, ["count", "-1"]),
        ({"hardware": {"gpu": {"count": "9" * 5000}}}, ["count"]),
        ({"hardware": {"gpu": {"count": 5000}}}, ["5000"]),
        ({"hardware": {"gpu": {"count": 2, "shared": True}}}, ["share"]),
        ({"hardware": {"gpu": {"shared": True}}}, ["size", "memory"]),
        ({"hardware": {"gpu": {"shared": "yes"}}}, ["shared", "true or false"]),
        ({"hardware": {"gpu": {"shared": False, "fraction": 0.5}}}, ["shared is false", "0.5"]),
        (
            {"hardware": {"gpu": {"shared": True, "fraction": 0.5, "memory": "8GB"}}},
            ["memory", "fraction (0.5)", "keep one"],
        ),
        ({"hardware": {"gpu": {"fraction": 0.5, "count": 2}}}, ["share", "2 GPUs"]),
        ({"hardware": {"gpu": {"fraction": 1.5}}}, ["fraction", "1.5"]),
        ({"hardware": {"gpu": {"fraction": "half"}}}, ["fraction", "half"]),
        (
            {"hardware": {"gpu": {"fraction": 0.5, "gpu_memory_fraction": 0.4}}},
            ["gpu_memory_fraction 0.4", "fraction 0.5"],
        ),
        ({"accelerators": "L4:0.5", "hardware": {"gpu": {"fraction": 0.4}}}, ["0.4", "0.5", "keep one"]),
        ({"hardware": {"gpu": {"compute_capability": "ampere"}}}, ["compute_capability", "ampere", "8.0"]),
        ({"hardware": {"gpu": {"count": 0, "compute_capability": "8.0", "shared": True}, "cpu": "x"}}, ["cpu"]),
        ({"hardware": {"disk": 100}}, ["hardware.disk", "100Gi"]),
        ({"gpu": "A100", "accelerators": "H100"}, ["gpu 'A100'", "accelerators 'H100'", "keep one"]),
        ({"gpu": {"count": 1}, "hardware": {"gpu": {"count": 2}}}, ["gpu", "hardware.gpu", "keep one"]),
        ({"hardware": {"gpu": "a100"}}, ["hardware.gpu", "a100"]),
        ({"hardware": {"memory": "lots"}}, ["hardware.memory", "32Gi"]),
        ({"hardware": {"cpu": "-1"}}, ["hardware.cpu"]),
        ({"hardware": {"cpu": True}}, ["hardware.cpu"]),
        ({"hardware": {"cpu": {}}}, ["hardware.cpu"]),
        ({"hardware": "big"}, ["hardware", "big"]),
        ({"hardware": {"gpus": 1}}, ["unknown field 'gpus'", "gpu"]),
        ({"accelerator": "A100"}, ["unknown field 'accelerator'", "accelerators"]),
        ({"labels": {"a": {"b": 1}}}, ["labels.a"]),
        ({"labels": "x"}, ["labels"]),
    ],
)
def test_mistakes_name_the_field(resources, fragments):
    with pytest.raises(InvalidTemplate) as caught:
        requirement_from_resources(resources, gpu_available=True)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_unknown_fields_may_be_passed_over():
    resources = {"hardware": {"nvme": "1T", "gpu": {"type": "a100", "nvlink": True}}, "region": "eu"}
    found = requirement_from_resources(resources, gpu_available=True, strict=False)
    assert found == (Requirement(gpu_count=1, gpu_names=("a100",)),)
