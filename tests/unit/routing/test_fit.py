"""Does a task fit a worker, and if not, is the reason told with both numbers?"""

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from strategies_of_routing import requirements

from gpuflow.errors import GPUFlowError
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match, nearness, share_mib
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


COMPUTE = {"t4": "7.5", "l4": "8.9", "4090": "8.9", "l40s": "8.9", "h100": "9.0", "h200": "9.0", "z900": None}


def machine(*cards, labels=None, tags=(), disk_free_mib=100 * 1024):
    gpus = tuple(
        Card(
            index,
            *CARDS[card],
            mig_parent_uuid="GPU-parent" if card == "mig" else None,
            compute_capability=COMPUTE.get(card, "8.0"),
        )
        for index, card in enumerate(cards)
    )
    return Capability.of(Box(gpus=gpus), labels=labels, tags=tags, disk_free_mib=disk_free_mib)


def gpu(**fields):
    return {"hardware": {"gpu": fields}}


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
        (gpu(compute_capability="8.0"), ["t4", "a100-40"], [1]),
        (gpu(compute_capability="8.9"), ["a100-40", "t4", "l4"], [2]),
        (gpu(compute_capability="8.0", count=2), ["t4", "t4", "a100-40", "a100-40"], [2, 3]),
        ("L4:0.5", ["t4", "l4"], [1]),
        (gpu(shared=True, memory="20GB"), ["t4", "l4", "h100"], [1]),
        (gpu(shared=True, memory="24GB"), ["l4"], [0]),  # all of it, which reports 22.5 GiB
        ({"hardware": {"disk": "100Gi"}}, ["t4"], []),
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
            gpu(compute_capability="8.0"),
            ["t4"],
            "compute_capability",
            "asks for compute capability 8.0 or more, the worker's best GPU has 7.5 (t4)",
        ),
        (
            gpu(compute_capability="10.0"),
            ["t4", "h100"],
            "compute_capability",
            "asks for compute capability 10.0 or more, the worker's best GPU has 9.0 (h100)",
        ),
        (
            gpu(compute_capability="8.0"),
            ["z900"],
            "compute_capability",
            "asks for compute capability 8.0 or more, the worker's GPUs do not tell theirs",
        ),
        (
            gpu(shared=True, memory="40GB"),
            ["l4"],
            "share",
            "asks for a share of 40 GB, the worker's largest has 24 GB (l4)",
        ),
        (
            {"hardware": {"disk": "200Gi"}},
            [],
            "disk",
            "asks for 200 GiB of free disk, the worker has 100 GiB free",
        ),
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


def test_a_worker_that_does_not_tell_its_disk_serves_no_ask_for_disk():
    (reason,) = fit({"hardware": {"disk": "1Gi"}}, machine(disk_free_mib=None)).reasons
    assert reason.message == "asks for 1 GiB of free disk, the worker does not tell how much it has"


def test_a_share_takes_the_fullest_gpu_that_has_room():
    worker = machine("l4", "l4", "l4")
    half = requirement_from_resources("L4:0.5", gpu_available=True)[0]
    assert share_mib(half, worker.gpus[0]) == 23034 // 2
    room = {"GPU-0": 23034, "GPU-1": 11600, "GPU-2": 8000}
    assert match(half, worker.with_room(room)).gpus == ("GPU-1",)
    found = match(half, worker.with_room({"GPU-2": 8000}))
    assert [(reason.kind, reason.message) for reason in found.reasons] == [
        ("share", "asks for a share of 11.25 GB of a GPU, at most 7.812 GB of one can be shared now (l4)")
    ]
    assert fit("L4", worker.with_room({"GPU-2": 8000})).fits, "room is for those who share"


@pytest.mark.parametrize(
    ("resources", "card", "mib"),
    [
        (gpu(shared=True, memory="12GB"), "l4", 11517),  # two of them fit
        (gpu(shared=True, memory="24GB"), "l4", 23034),
        (gpu(shared=True, memory="8GB"), "a100-80", 8192),
        (gpu(fraction=0.25), "a100-80", 20480),
        ("L4", "l4", None),
    ],
)
def test_how_much_a_share_takes(resources, card, mib):
    ask = requirement_from_resources(resources, gpu_available=True)[0]
    assert share_mib(ask, machine(card).gpus[0]) == mib


def test_nearness_counts_misses_and_then_measures_them():
    ask = {"accelerators": "A100-80GB:2", "hardware": {"cpu": 16}, "labels": {"team": "nlp"}}
    nlp = {"team": "nlp"}
    workers = [
        machine("a100-80", "a100-80", labels=nlp),
        machine("a100-80", labels=nlp),
        machine("a100-80", "a100-80"),
        machine("a100-40", "a100-40"),
        machine("t4"),
    ]
    found = [nearness(fit(ask, worker)) for worker in workers]
    assert found[0] == 0
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert [int(one) for one in found] == [0, 1, 1, 2, 2]


WORKERS = [machine(), machine("t4"), machine("a100-80", "a100-80", "mig", "4090", labels={"a": "b"})]


@given(requirements())
def test_every_pair_has_an_answer(requirement):
    for worker in WORKERS:
        found = match(requirement, worker)
        assert found.fits == (not found.reasons) == (nearness(found) == 0)
        assert all(0 <= reason.gap <= 1 for reason in found.reasons)
        assert nearness(found) < len(found.reasons) + 1
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


@pytest.mark.parametrize("hardware", [{}, {"hardware": {"disk": "100Gi"}}])
def test_nothing_fits_below_the_floor_of_free_disk(hardware):
    (asked, *_) = requirement_from_resources(hardware, gpu_available=False)
    full = replace(machine(disk_free_mib=300), disk_floor_mib=1024)
    (one,) = match(asked, full).reasons
    assert (one.kind, one.has) == ("disk", "300 MiB")
    assert "1 GiB of free disk, which a worker keeps" in one.asked
    assert Capability.from_dict(full.to_dict()) == full
    roomy = replace(full, disk_free_mib=200 * 1024)
    assert match(asked, roomy).fits
    assert match(asked, replace(full, disk_free_mib=None)).fits == (not hardware)
