"""What an attempt has used: whole GPUs, shares, sessions, CPUs; energy of whole GPUs; cost by the part of a machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from gpuflow.fleet.gpu_energy import REST_SECONDS, EnergyReader
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.ledger.records import Usage
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.worker.usage_meter import UsageMeter, energy_between
from tests.support.waiting import eventually, patient

GPUS = tuple(
    GpuCapability(uuid=f"GPU-{number}", index=number, names=("a100",), vram_gb=40.0, total_mib=40_000)
    for number in range(4)
)
BOX = Capability(gpus=GPUS, cpu_count=64)
CPU_BOX = Capability(cpu_count=8)


class Machine:
    """A machine whose clock, energy and sharers a test sets."""

    def __init__(self, *, tells_energy: bool = True) -> None:
        self.now = 0.0
        self.watts = 250.0
        self.sharers = 1
        self.asked: list[Sequence[str]] = []
        self._tells = tells_energy

    def energy(self, uuids: Sequence[str]) -> Mapping[str, float]:
        self.asked.append(uuids)
        return dict.fromkeys(uuids, 1000 + self.now * self.watts) if self._tells else {}

    def meter(self, capability: Capability, hold: Hold, *, cpus: float = 1, cost: float = 3.6) -> UsageMeter:
        return UsageMeter(
            capability,
            hold,
            cpus=cpus,
            cost_per_hour=cost,
            sharers=lambda: self.sharers,
            energy=EnergyReader(self.energy, wait_seconds=patient(60)),
            clock=lambda: self.now,
        )


@pytest.mark.parametrize(
    ("capability", "hold", "cpus", "gpu_seconds", "joules", "cost"),
    [
        (BOX, Hold(("GPU-0", "GPU-1")), 1, 20, 5000, 0.005),  # half of 3.6 an hour for 10 s
        (BOX, Hold(("GPU-0",), share_mib=10_000), 1, 2.5, 0, 0.000625),
        (BOX, Hold(()), 16, 0, 0, 0.0025),
        (CPU_BOX, Hold(()), 2, 0, 0, 0.0025),
        (CPU_BOX, Hold(()), 80, 0, 0, 0.01),
    ],
    ids=["two GPUs", "a share of one", "CPUs of a GPU machine", "CPUs", "more CPUs than there are"],
)
def test_what_ten_seconds_use(
    capability: Capability, hold: Hold, cpus: float, gpu_seconds: float, joules: float, cost: float
) -> None:
    machine = Machine()
    meter = machine.meter(capability, hold, cpus=cpus)
    machine.now = 10.0
    used = meter.stop()
    assert used.seconds == 10
    assert used.gpu_seconds == pytest.approx(gpu_seconds)
    assert used.energy_joules == pytest.approx(joules)
    assert used.cost == pytest.approx(cost)
    machine.now = 99.0
    assert meter.stop() == used, "only the first call measures"
    assert meter.with_artifacts(7) == Usage(
        seconds=10, gpu_seconds=used.gpu_seconds, energy_joules=used.energy_joules, cost=used.cost, artifact_bytes=7
    )


def test_requests_of_a_session_divide_its_gpus() -> None:
    machine = Machine()
    machine.sharers = 3
    meter = machine.meter(BOX, Hold(("GPU-0",)))
    machine.now, machine.sharers = 10.0, 5
    used = meter.stop()
    assert used.gpu_seconds == pytest.approx(10 * 2 / (3 + 5))
    assert used.energy_joules == 0, "nobody knows whose energy that was"


def test_a_driver_that_tells_no_energy_costs_nothing_else() -> None:
    machine = Machine(tells_energy=False)
    meter = machine.meter(BOX, Hold(("GPU-0",)))
    machine.now = 10.0
    assert (meter.stop().gpu_seconds, meter.stop().energy_joules) == (10, 0)


def test_a_driver_that_hangs_is_left_alone_for_a_minute() -> None:
    now, asked, answers = [0.0], [0], threading.Event()

    def hangs(uuids: Sequence[str]) -> Mapping[str, float]:
        asked[0] += 1
        answers.wait()
        return dict.fromkeys(uuids, 7.0)

    reader = EnergyReader(hangs, wait_seconds=0.01, clock=lambda: now[0])
    assert reader.read(["GPU-0"]) == {} and asked == [1]
    answers.set()
    now[0] += REST_SECONDS - 1
    assert reader.read(["GPU-0"]) == {} and asked == [1], "it is not asked"

    def told() -> Mapping[str, float]:
        now[0] += REST_SECONDS
        return reader.read(["GPU-0"])

    assert eventually(told, what="an answer of the driver that answers again") == {"GPU-0": 7.0}


def test_the_driver_is_not_asked_for_a_task_without_gpus() -> None:
    machine = Machine()
    machine.meter(BOX, Hold(())).stop()
    assert machine.asked == []


def test_a_gpu_that_was_reset_or_lost_counts_nothing() -> None:
    assert energy_between({"a": 100.0, "b": 100.0, "c": 5.0}, {"a": 3.0, "c": 9.0}) == 4.0


def test_use_is_added_divided_and_read_back() -> None:
    one = Usage(seconds=2, gpu_seconds=4, energy_joules=6, cost=8, artifact_bytes=10)
    assert (one + one).times(0.5) == one
    assert one.public() == {"seconds": 2, "gpuSeconds": 4, "energyJoules": 6, "cost": 8, "artifactBytes": 10}
    assert Usage.from_dict(one.public()) == one
    assert Usage().public() == {} and Usage.from_dict(None) == Usage()
    assert Usage.from_dict({"cost": "much", "unknown": 1}) == Usage()
    assert Usage(seconds=1, cost=float("inf"), energy_joules=float("nan")).to_json() == '{"seconds": 1}'
