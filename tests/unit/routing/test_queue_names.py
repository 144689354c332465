"""Names of queues: readable, different for different asks, stable, and covered by -Q as documented."""

import re

import pytest
from hypothesis import given
from strategies_of_routing import requirements

from gpuflow.routing.queue_names import MAX_NAME_LENGTH, family_matches, is_demand_queue, queue_name
from gpuflow.routing.requirement import Requirement


def gpu(**fields):
    return Requirement(**{"gpu_count": 1, **fields})


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        (Requirement(), "cpu"),
        (Requirement(cpu=8, memory_mib=32 * 1024), "cpu-8c-ram32g"),
        (Requirement(cpu=0.5, memory_mib=500), "cpu-500mc-ram500m"),
        (gpu(), "gpu"),
        (gpu(gpu_count=2), "gpu-x2"),
        (gpu(gpu_count=1, gpu_count_max=4), "gpu-x1to4"),
        (gpu(gpu_names=("a100",)), "gpu-a100"),
        (gpu(vram_gb_min=40), "gpu-40g"),
        (gpu(vram_gb_min=22.5), "gpu-23040m"),
        (gpu(vram_gb_min=24, vram_gb_max=80), "gpu-24g-max80g"),
        (gpu(vram_gb_max=24), "gpu-max24g"),
        (gpu(gpu_names=("a100",), vram_gb_min=80, gpu_count=4), "gpu-a100-80g-x4"),
        (gpu(gpu_names=("a100",), labels=(("team", "nlp"),)), "gpu-a100.team=nlp"),
        (gpu(labels=(("location", "us-*"), ("fast", ""))), "gpu.fast.location=us-+"),
        (gpu(labels=(("zone", "a.b,c d"),)), "gpu.zone=a%2Eb%2Cc%20d"),
        (gpu(gpu_names=("a100*",)), "gpu-a100+"),
        (gpu(gpu_names=("rtx40?0",)), "gpu-rtx40~0"),
        (gpu(gpu_names=("h100", "a100")), "gpu-a100_h100"),
    ],
)
def test_names(requirement, name):
    """These names are stored in running systems: a change here needs a migration."""
    assert queue_name(requirement) == name
    assert requirement.queue_name() == name


def test_a_long_name_is_cut_and_hashed():
    long = gpu(gpu_names=("a100",), labels=(("note", "y" * 200),))
    name = queue_name(long)
    assert len(name) == MAX_NAME_LENGTH
    assert re.fullmatch(r"gpu-a100\.note=y+-h[0-9a-f]{16}", name)
    assert name != queue_name(gpu(gpu_names=("a100",), labels=(("note", "y" * 201),)))


@given(requirements())
def test_names_are_safe_for_the_command_line(requirement):
    name = queue_name(requirement)
    assert re.fullmatch(r"(cpu|gpu)[A-Za-z0-9_:@.=%+~-]*", name)
    assert len(name) <= MAX_NAME_LENGTH
    assert is_demand_queue(name)


@given(requirements(), requirements())
def test_different_asks_have_different_names(one, other):
    assert (one == other) == (queue_name(one) == queue_name(other))


@pytest.mark.parametrize(
    ("family", "covered", "not_covered"),
    [
        (
            "gpu-a100",
            ["gpu-a100", "gpu-a100-80g", "gpu-a100-80g-x4", "gpu-a100.team=nlp", "gpu-a100-x2"],
            ["gpu-a1000", "gpu-a100+", "gpu-a100_h100", "gpu", "gpu-h100", "cpu"],
        ),
        ("gpu", ["gpu", "gpu-a100", "gpu-40g-x2", "gpu.team=nlp"], ["cpu", "gpuflow.control", "gpu2"]),
        ("cpu", ["cpu", "cpu-8c", "cpu.zone=a"], ["gpu", "cpus"]),
        ("gpu-a100-80g", ["gpu-a100-80g-x4", "gpu-a100-80g-max94g"], ["gpu-a100", "gpu-80g"]),
        ("tasks", ["tasks"], ["gpu"]),
    ],
)
def test_families(family, covered, not_covered):
    assert [name for name in covered if not family_matches(name, family)] == []
    assert [name for name in not_covered if family_matches(name, family)] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu", True),
        ("gpu-a100", True),
        ("cpu.x=1", True),
        ("gpuflow.control", False),
        ("celery", False),
        ("", False),
    ],
)
def test_demand_queues_are_told_from_plain_ones(name, expected):
    assert is_demand_queue(name) is expected
