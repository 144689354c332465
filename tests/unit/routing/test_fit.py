"""Does a task fit a worker, and if not, is the reason told with both numbers?"""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from strategies_of_routing import requirements

from gpuflow.errors import GPUFlowError
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.resources import requirement_from_resources


@dataclass(frozen=True)
class Card:
    index: int
    name: str
    total_mib: int
    mig_parent_uuid: str | None = None
    compute_capability: str | None = "8.0"

    @property
    def uuid(self):
        return f"GPU-{self.index}"


@dataclass(frozen=True)
class Box:
    gpus: tuple[Card, ...] = ()
    cpu_count: int = 16
    memory_total_mib: int = 64 * 1024


CARDS = {
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40960),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 81920),
    "h100": ("NVIDIA H100 80GB HBM3", 81559),
    "l4": ("NVIDIA L4", 23034),
    "t4": ("Tesla T4", 15360),
    "l40s": ("NVIDIA L40S", 46068),
    "h200": ("NVIDIA H200", 143771),
    "4090": ("NVIDIA GeForce RTX 4090", 24564),
    "mig": ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192),
    "z900": ("NVIDIA Z900", 97000),
}


def machine(*cards, labels=None, tags=()):
    gpus = tuple(
        Card(index, *CARDS[card], mig_parent_uuid="GPU-parent" if card == "mig" else None)
        for index, card in enumerate(cards)
    )
    return Capability.of(Box(gpus=gpus), labels=labels, tags=tags)


def fit(resources, capability):
    return match(requirement_from_resources(resources, gpu_available=True)[0], capability)


@pytest.mark.parametrize(
    ("resources", "cards", "gpus"),
    [
        ("cpu", [], []),
        ("cpu", ["t4"], []),
        ("1", ["t4"], [0]),
        ("any:2", ["t4", "t4"], [0, 1]),
        ("24GB", ["l4"], [0]),  # reports 22.5 GiB
        ("16GB", ["t4"], [0]),  # reports 15.0 GiB
        ("48GB", ["l40s"], [0]),  # reports 45.0 GiB
        ("141GB", ["h200"], [0]),
        ("46Gi", ["l40s"], [0]),
        ("80GB", ["a100-40", "a100-80"], [1]),
        ("A100-80GB:2", ["a100-80", "a100-40", "a100-80"], [0, 2]),
        ("A100:1", ["h100", "a100-80", "a100-40"], [2]),  # the smallest that will do
        ("24GB..80GB", ["t4", "h200", "h100"], [2]),
        ("..24GB", ["a100-40", "4090"], [1]),
        ("10GB+", ["mig"], [0]),
        ("mig*:1", ["a100-40", "mig"], [1]),
        ("90GB", ["z900"], [0]),
        ("z900", ["z900"], [0]),
        ("1..4", ["t4", "t4", "t4"], [0, 1, 2]),
        ("1..2", ["t4", "t4", "t4"], [0, 1]),
        ("2", ["t4", "a100-40", "t4"], [0, 2]),  # one kind
    ],
)
def test_fits(resources, cards, gpus):
    found = fit(resources, machine(*cards))
    assert found.reasons == ()
    assert found.fits
    assert found.gpus == tuple(f"GPU-{index}" for index in gpus)


@pytest.mark.parametrize(
    ("resources", "cards", "kind", "message"),
    [
        ("1", [], "gpu_count", "asks for 1 GPU, the worker has none"),
        ("A100", ["l4", "l4", "t4"], "gpu_name", "asks for a100, the worker has 2x l4, 1x t4"),
        ("80GB", ["a100-40"], "vram", "asks for 80 GB per GPU, the worker's largest has 40 GB (a100)"),
        (
            "..24GB",
            ["h100"],
            "vram",
            "asks for at most 24 GB per GPU, the worker's smallest has 80 GB (h100)",
        ),
        (
            "24GB..40GB",
            ["t4", "h100"],
            "vram",
            "asks for 24 GB to 40 GB per GPU, the worker's largest has 80 GB (h100)",
        ),
        ("A100:4", ["a100-80", "a100-80"], "gpu_count", "asks for 4 GPUs, the worker has 2 such"),
        ("2", ["t4", "l4"], "gpu_count", "asks for 2 GPUs, the worker has 1 such of one kind"),
        ("2", ["mig", "mig"], "gpu_count", "asks for 2 GPUs, the worker has MIG slices only"),
        ("A100", ["mig"], "gpu_name", "asks for a100, the worker has 1x mig3g40gb"),
        ({"hardware": {"cpu": 64}}, [], "cpu", "asks for 64 CPUs, the worker has 16"),
        (
            {"hardware": {"memory": "128Gi"}},
            [],
            "memory",
            "asks for 128 GiB of memory, the worker has 64 GiB",
        ),
    ],
)
def test_does_not_fit(resources, cards, kind, message):
    found = fit(resources, machine(*cards))
    assert not found.fits
    assert found.gpus == ()
    assert [(reason.kind, reason.message) for reason in found.reasons] == [(kind, message)]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"location": "us-*"}, True),
        ({"location": "us-east"}, True),
        ({"location": "eu-*"}, False),
        ({"location": None}, True),
        ({"fast": None}, True),
        ({"fast": "*"}, True),
        ({"fast": "yes"}, False),
        ({"missing": "*"}, False),
        ({"location": "US-*"}, False),
    ],
)
def test_labels_are_globs(asked, fits):
    worker = machine("t4", labels={"location": "us-east"}, tags=("fast",))
    assert fit({"labels": asked}, worker).fits is fits


def test_every_failing_requirement_is_told():
    found = fit(
        {"accelerators": "H100:8", "hardware": {"cpu": 64, "memory": "1Ti"}, "labels": {"team": "nlp"}},
        machine("t4", labels={"team": "vision"}),
    )
    assert [reason.kind for reason in found.reasons] == ["gpu_name", "cpu", "memory", "label"]
    assert found.reasons[-1].message == "asks for label team=nlp, the worker has team=vision"


def test_free_gpus_alone_decide_admission():
    worker = machine("a100-80", "a100-80", "t4")
    assert fit("A100:2", worker).fits
    assert not fit("A100:2", worker.only({"GPU-0", "GPU-2"})).fits
    assert fit("A100:1", worker.only({"GPU-1"})).gpus == ("GPU-1",)


WORKERS = [machine(), machine("t4"), machine("a100-80", "a100-80", "mig", "4090", labels={"a": "b"})]


@given(requirements())
def test_every_pair_has_an_answer(requirement):
    for worker in WORKERS:
        found = match(requirement, worker)
        assert found.fits == (not found.reasons)
        if found.fits:
            assert requirement.gpu_count <= len(set(found.gpus)) <= max(1, len(worker.gpus))


def test_a_capability_goes_through_json():
    worker = machine("a100-80", "mig", labels={"zone": "a"}, tags=("fast",))
    assert Capability.from_dict(json.loads(json.dumps(worker.to_dict()))) == worker
    with pytest.raises(GPUFlowError, match="schema 2"):
        Capability.from_dict({"schema": 2})


def test_a_newer_field_of_the_same_schema_is_passed_over():
    data = {**machine("t4").to_dict(), "cost": 3}
    data["gpus"][0]["nvlink"] = True
    assert Capability.from_dict(data) == machine("t4")
