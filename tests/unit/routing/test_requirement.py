"""Requirements: canonical, comparable, and safe to store."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_routing import requirements

from gpuflow.errors import GPUFlowError
from gpuflow.routing.requirement import Requirement


@given(requirements())
def test_json_and_back(requirement):
    assert Requirement.from_dict(json.loads(json.dumps(requirement.to_dict()))) == requirement


def test_equal_asks_are_equal_values():
    one = Requirement(gpu_count=1, gpu_names=("H100", "NVIDIA A100"), labels=(("b", "1"), ("a", "2")))
    other = Requirement(
        gpu_count=1, gpu_count_max=1, gpu_names=("a100", "h100", "h100"), labels=(("a", "2"), ("b", "1"))
    )
    assert one == other
    assert hash(one) == hash(other)


def test_any_among_the_names_means_any():
    assert Requirement(gpu_count=1, gpu_names=("a100", "any")) == Requirement(gpu_count=1)


def test_only_what_is_asked_is_stored():
    assert Requirement().to_dict() == {"schema": 1}
    assert Requirement(gpu_count=2, gpu_names=("a100",)).to_dict() == {
        "schema": 1,
        "gpu_count": 2,
        "gpu_names": ["a100"],
    }


def test_a_newer_schema_is_refused():
    with pytest.raises(GPUFlowError, match="schema 3"):
        Requirement.from_dict({"schema": 3})


def test_an_ask_that_an_older_version_can_read_is_written_for_it():
    assert Requirement(gpu_count=1, vram_gb_min=24, labels=(("a", "b"),)).to_dict()["schema"] == 1
    assert Requirement(disk_gib=100).to_dict() == {"schema": 2, "disk_gib": 100}
    assert Requirement(gpu_count=1, gpu_share=0.5).to_dict() == {"schema": 2, "gpu_count": 1, "gpu_share": 0.5}
    assert Requirement.from_dict({"schema": 1, "gpu_count": 1, "vram_gb_min": 24.0}) == Requirement(
        gpu_count=1, vram_gb_min=24
    )


@pytest.mark.parametrize(
    ("share", "rounded"),
    [(0.5, 0.5), (1, None), (1 / 3, 0.333), (1 / 6, 0.166), (0.29, 0.29), (0.9999, 0.999), (0.0001, 0.001)],
)
def test_shares_are_rounded_down_so_that_n_parts_fit_one_gpu(share, rounded):
    assert Requirement(gpu_count=1, gpu_share=share).gpu_share == rounded


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_count": -1},
        {"gpu_count": 2000},
        {"gpu_count": 4, "gpu_count_max": 2},
        {"gpu_names": ("a100",)},
        {"vram_gb_min": 8},
        {"gpu_count": 1, "vram_gb_min": 80, "vram_gb_max": 40},
        {"gpu_count": 1, "vram_gb_min": -1},
        {"cpu": -2},
        {"cpu": float("inf")},
        {"memory_mib": -5},
        {"gpu_count": 1, "gpu_names": ("x4",)},
        {"labels": (("a", "1"), ("a", "2"))},
        {"labels": (("", "1"),)},
        {"disk_gib": -1},
        {"disk_gib": float("nan")},
        {"compute_capability_min": "8.0"},
        {"gpu_count": 1, "compute_capability_min": "new"},
        {"gpu_share": 0.5},
        {"gpu_count": 2, "gpu_share": 0.5},
        {"gpu_count": 1, "gpu_count_max": 2, "gpu_share": 0.5},
        {"gpu_count": 1, "gpu_share": 1.5},
        {"gpu_count": 1, "gpu_share": float("nan")},
        {"gpu_count": 1, "gpu_shared": True},
        {"gpu_count": 2, "gpu_shared": True, "vram_gb_min": 8},
        {"gpu_count": 1, "gpu_shared": True, "gpu_share": 0.5, "vram_gb_min": 8},
        {"gpu_count": 1, "gpu_names": ("cc80",)},
        {"gpu_count": 1, "gpu_names": ("share50",)},
    ],
)
def test_contradictions_are_refused(fields):
    with pytest.raises(GPUFlowError):
        Requirement(**fields)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e6))
def test_amounts_are_rounded_once(value):
    once = Requirement(cpu=value)
    assert Requirement(cpu=once.cpu) == once
