"""The GPUs of a worker: real lock files, and a driver that is simulated or made of plain figures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuflow.fleet.gpu_locks import GpuLocks, Hold
from gpuflow.fleet.gpu_usage import UsageReader
from gpuflow.fleet.hardware_nvml import GpuProcess, GpuUse, Uses
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.placement import FreeGpus
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import FRESH_SECONDS, MachineGpus
from tests.fixtures.simulated_nvml import SimGpu, gpu_uuid


def gpu(index: int, **more: Any) -> GpuCapability:
    facts = {"names": ("a100", "a100-sxm4"), "vram_gb": 80.0, "total_mib": 81_920, **more}
    return GpuCapability(**{"uuid": f"GPU-{index}", "index": index, **facts})


FOUR = Capability(gpus=tuple(gpu(index) for index in range(4)), cpu_count=8, memory_mib=1000)
SLICED = Capability(gpus=(gpu(0), *(gpu(1, uuid=f"MIG-{i}", mig_parent_uuid="GPU-1") for i in range(2))))


#: Above the largest process id of Linux: as good as dead, or in another namespace.
NO_PID = 2**22 + 1


class Driver:
    """What the driver tells: memory in use and (pid, MiB) by GPU, what is lost, and how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        self.used: dict[str, int] = {}
        self.processes: dict[str, list[tuple[int, int]]] = {}
        self.lost: set[str] = set()
        self.hangs: threading.Event | None = None

    def read(self, uuids: Sequence[str]) -> Uses:
        self.asked += 1
        if self.hangs is not None:
            self.hangs.wait(30)
        uses = {
            uuid: GpuUse(
                uuid=uuid,
                total_mib=81_920,
                used_mib=self.used.get(uuid, 0),
                processes=tuple(GpuProcess(pid=pid, used_mib=mib) for pid, mib in self.processes.get(uuid, [])),
            )
            for uuid in uuids
            if uuid not in self.lost
        }
        return Uses(uses=uses, failed=dict.fromkeys(set(uuids) - set(uses), "the GPU is lost"))


Make = Callable[..., MachineGpus]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def machine(tmp_path: Path, driver: Driver) -> Make:
    """Return a function that makes one more worker of the same machine."""

    def make(capability: Capability = FOUR) -> MachineGpus:
        reader = UsageReader(driver.read)
        return MachineGpus(capability.gpus, tmp_path / "locks", clock=lambda: driver.now, reader=reader)

    return make


def offered(machine: MachineGpus, capability: Capability, *, asks_memory: bool = True) -> Capability:
    """Return what a task for one GPU could be given, whether or not it says how much memory it needs."""
    asked = Requirement(gpu_count=1, vram_gb_min=1.0 if asks_memory else None)
    return machine.snapshot(capability).offered(asked, capability)


def names(capability: Capability) -> str:
    return " ".join(one.uuid for one in capability.gpus)


def taken(hold: Hold | None) -> Hold:
    assert hold is not None
    return hold


def test_without_gpus_nothing_is_done(tmp_path: Path) -> None:
    alone, capability = MachineGpus((), tmp_path / "locks"), Capability(cpu_count=4)
    assert alone.snapshot(capability) == FreeGpus()
    hold = taken(alone.claim(()))
    assert alone.claim(["GPU-0"]) is None
    assert alone.release(hold)
    assert (alone.held_back(), alone.usage(), alone.lost(), alone.identity()) == ({}, {}, {}, None)
    reserved = alone.reserve(task="t", queue="q", gpus=[], worker="w", term_seconds=1)
    assert (alone.reservation(), reserved, alone.drop("t", "w"), alone.problem) == (None, None, False, None)
    assert list(tmp_path.iterdir()) == []


def test_two_workers_of_a_machine_see_each_others_gpus(machine: Make, driver: Driver) -> None:
    one, two = machine(), machine()
    assert names(offered(two, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"
    hold = taken(one.claim(["GPU-1", "GPU-2"]))
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == names(offered(two, FOUR)) == "GPU-0 GPU-3"
    assert offered(two, FOUR).cpu_count == 8
    assert two.claim(["GPU-2", "GPU-3"]) is None
    assert one.release(hold)
    assert one.release(hold)
    driver.now += FRESH_SECONDS
    assert names(offered(two, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"


def test_what_was_seen_counts_for_a_moment_unless_it_changed_here(machine: Make, driver: Driver) -> None:
    one, two = machine(), machine()
    offered(one, FOUR), offered(one, FOUR)
    assert driver.asked == 1
    taken(two.claim(["GPU-0"]))
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"
    assert one.claim(["GPU-0"]) is None
    assert names(offered(one, FOUR)) == "GPU-1 GPU-2 GPU-3"


def test_foreign_memory_is_promised_to_nobody(machine: Make, driver: Driver) -> None:
    driver.used = {"GPU-0": 512, "GPU-1": 513, "GPU-2": 40_960, "GPU-3": 81_920}
    one = machine()
    found = offered(one, FOUR)
    assert names(found) == "GPU-0 GPU-1 GPU-2"
    assert [(part.vram_gb, part.total_mib) for part in found.gpus] == [(80, 81_920), (79.4, 81_407), (40, 40_960)]
    assert names(offered(one, FOUR, asks_memory=False)) == "GPU-0"
    assert one.snapshot(FOUR).room_mib == {"GPU-0": 81_408, "GPU-1": 81_407, "GPU-2": 40_960, "GPU-3": 0}
    assert one.usage()["GPU-2"].foreign_mib == 40_960


def test_a_share_takes_what_is_left(machine: Make, driver: Driver) -> None:
    driver.used = {"GPU-0": 1920}
    one, two = machine(), machine()
    first = taken(one.claim(["GPU-0"], share_mib=50_000))
    driver.now += FRESH_SECONDS
    assert names(offered(two, FOUR)) == "GPU-1 GPU-2 GPU-3"
    driver.used = {"GPU-0": 51_920}  # and it uses what it was promised
    driver.processes = {"GPU-0": [(NO_PID, 50_000)]}
    driver.now += FRESH_SECONDS
    assert two.snapshot(FOUR).room_mib["GPU-0"] == 30_000
    assert two.claim(["GPU-0"], share_mib=30_001) is None
    second = taken(two.claim(["GPU-0"], share_mib=30_000))
    assert one.claim(["GPU-0"], share_mib=1) is None
    assert not one.release(first, wait_seconds=0), "its process died and is on the GPU still"
    driver.used, driver.processes = {}, {}
    assert two.release(second)
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"


def test_a_lost_gpu_is_out_until_it_is_back(machine: Make, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    one = machine()
    hold = taken(one.claim(["GPU-2"]))
    driver.lost = {"GPU-1", "GPU-2"}
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == "GPU-0 GPU-3"
    assert set(one.lost()) == {"GPU-1", "GPU-2"}, "also the one that a task runs on"
    assert one.snapshot(FOUR).room_mib["GPU-1"] == 0
    assert one.claim(["GPU-1"]) is None
    assert one.claim(["GPU-1"], share_mib=5) is None
    assert "GPU-1: the GPU is lost" in (one.problem or "")
    assert one.release(hold), "nobody is on a GPU that is lost"
    for _ in range(3):
        driver.now += FRESH_SECONDS
        offered(one, FOUR)
    assert len([line for line in caplog.messages if "gpus_not_usable" in line]) == 1
    driver.lost = set()
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"
    assert one.problem is None


def test_slices_are_gpus_and_keep_their_parent(machine: Make, driver: Driver) -> None:
    one = machine(SLICED)
    hold = taken(one.claim(["MIG-0"]))
    assert names(offered(one, SLICED)) == "GPU-0 MIG-1"
    assert machine().claim(["GPU-1"]) is None
    assert one.release(hold)
    assert machine().claim(["GPU-1"]) is not None


def test_a_driver_that_hangs_gives_out_nothing_until_it_answers(
    machine: Make, driver: Driver, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gpuflow.worker.machine_gpus.DRIVER_WAIT_SECONDS", 0.02)
    one = machine()
    driver.hangs = threading.Event()
    assert names(offered(one, FOUR)) == ""
    assert one.claim(["GPU-0"]) is None
    assert "does not answer" in (one.problem or "")
    driver.hangs.set()
    driver.hangs = None
    monkeypatch.setattr("gpuflow.worker.machine_gpus.DRIVER_WAIT_SECONDS", 30)
    stuck = one._reader._driver._stuck
    if stuck is not None:
        stuck.join(30)
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"


def test_a_directory_that_fails_gives_out_nothing_and_says_so(machine: Make, driver: Driver, tmp_path: Path) -> None:
    one = machine()
    hold = taken(one.claim(["GPU-0"]))
    (tmp_path / "locks").rename(tmp_path / "moved")
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == ""
    assert one.claim(["GPU-1"]) is None
    assert one.reservation() is None
    assert "GPUFLOW_LOCK_DIR" in (one.problem or "")
    assert one.release(hold)
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"


def test_a_full_disk_refuses_a_share_and_is_named(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    one = machine()
    offered(one, FOUR)
    monkeypatch.setattr("os.link", full)
    assert one.claim(["GPU-0"], share_mib=5) is None
    assert "No space left on device" in (one.problem or "")
    taken(one.claim(["GPU-1"])).close()
    monkeypatch.undo()
    taken(one.claim(["GPU-0"], share_mib=5)).close()
    assert one.problem is None


def test_a_gpu_is_given_back_when_nothing_is_left_on_it(machine: Make, driver: Driver) -> None:
    driver.processes = {"GPU-0": [(11, 400)]}  # foreign, there before
    one = machine()
    hold = taken(one.claim(["GPU-0"]))
    driver.processes = {"GPU-0": [(11, 400), (NO_PID, 7000)]}
    assert not one.release(hold, wait_seconds=0), "something is left: the caller hears of it, the GPU is given back"
    driver.used = {"GPU-0": 7400}
    driver.now += FRESH_SECONDS
    assert names(offered(one, FOUR, asks_memory=False)) == "GPU-1 GPU-2 GPU-3"

    driver.processes, driver.used = {"GPU-0": [(11, 400)]}, {"GPU-0": 400}
    hold = taken(one.claim(["GPU-0"]))
    assert one.release(hold)
    hold = taken(one.claim(["GPU-0"]))
    driver.used = {"GPU-0": 9000}  # no process is listed, as in a container, but memory is
    assert not one.release(hold, wait_seconds=0)


def test_a_gpu_is_held_while_something_is_left_on_it(machine: Make, driver: Driver, tmp_path: Path) -> None:
    one = machine()
    hold = taken(one.claim(["GPU-0"]))
    held_meanwhile: list[bool] = []
    real = driver.read

    def read(uuids: Sequence[str]) -> Uses:
        held_meanwhile.append(GpuLocks(tmp_path / "locks").free(["GPU-0"]) == ())
        driver.processes = {"GPU-0": [(NO_PID, 7000)]} if len(held_meanwhile) < 3 else {}
        return real(uuids)

    one._reader._read = read
    assert one.release(hold)
    assert held_meanwhile == [True, True, True]
    assert GpuLocks(tmp_path / "locks").free(["GPU-0"]) == ("GPU-0",)


def test_the_reservation_is_that_of_the_machine(machine: Make) -> None:
    one, two = machine(), machine()
    ours = one.reserve(task="big", queue="gpu-x4", gpus=["GPU-0"], worker="w1", term_seconds=60)
    assert ours is not None
    assert two.reservation() == ours
    assert two.reserve(task="other", queue="gpu-x4", gpus=["GPU-0"], worker="w2", term_seconds=60) == ours
    assert not two.drop("other", "w2")
    assert one.drop("big", "w1")
    assert two.reservation() is None


def test_all_workers_of_a_directory_name_the_same(machine: Make, tmp_path: Path) -> None:
    first, second = machine().identity(), machine().identity()
    assert first == second
    assert first is not None
    assert first["path"] == str(tmp_path / "locks")


def test_threads_never_have_the_same_gpu(machine: Make) -> None:
    one, two = machine(), machine()
    mine, wrong, lock = set[str](), list[str](), threading.Lock()

    def work(worker: MachineGpus, want: list[str]) -> None:
        for _ in range(25):
            offered(worker, FOUR)
            hold = worker.claim(want)
            if hold is None:
                continue
            with lock:
                wrong.extend(mine & set(want))
                mine.update(want)
            with lock:
                mine.difference_update(want)
            worker.release(hold)

    wants = [["GPU-0"], ["GPU-0", "GPU-1"], ["GPU-2", "GPU-1"], ["GPU-3", "GPU-2", "GPU-1", "GPU-0"]]
    threads = [threading.Thread(target=work, args=((one, two)[i % 2], want)) for i, want in enumerate(wants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert names(offered(one, FOUR)) == "GPU-0 GPU-1 GPU-2 GPU-3"


SIMULATED = """
import json, os, sys
from pathlib import Path
from gpuflow.fleet.hardware import probe
from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import MachineGpus

now = 0.0
capability = Capability.of(probe())
machine = MachineGpus(capability.gpus, Path(sys.argv[1]), clock=lambda: now)
asked, shown = Requirement(gpu_count=1, vram_gb_min=1.0), []
for state in sys.argv[2:]:
    now += 1
    Path(os.environ["FAKE_NVML_STATE"]).write_text(Path(state).read_text())
    shown.append([[gpu.uuid, gpu.vram_gb] for gpu in machine.snapshot(capability).offered(asked, capability).gpus])
hold = machine.claim([shown[-1][0][0]])
print(json.dumps({"shown": shown, "taken": hold.uuids, "clean": machine.release(hold)}))
"""


HANGS = """
import sys
from pathlib import Path
from gpuflow.fleet.hardware import probe
from gpuflow.routing.capability import Capability
from gpuflow.worker import machine_gpus
from tests.fixtures.simulated_nvml import write_machine

capability = Capability.of(probe())
machine = machine_gpus.MachineGpus(capability.gpus, Path(sys.argv[1]))
write_machine(Path(sys.argv[2]), "T4", hang_ms=500)
machine_gpus.DRIVER_WAIT_SECONDS = 0.01
print(len(machine.snapshot(capability).whole), machine.problem)
"""


def test_with_a_simulated_driver_that_hangs(run_python: Any, simulated_nvml: Any, tmp_path: Path) -> None:
    one = simulated_nvml("T4")
    env = {**one.env, "PYTHONPATH": str(Path(__file__).parents[3])}
    told = run_python(HANGS, env, str(tmp_path / "locks"), str(one.state))
    assert told.startswith("0 the NVIDIA driver does not answer")


HANGS_FOR_EVER = """
import sys
from pathlib import Path
from gpuflow.fleet import hardware
from tests.fixtures.simulated_nvml import write_machine

(gpu,) = hardware.probe().gpus
write_machine(Path(sys.argv[1]), "T4", hang_ms=3_600_000)
hardware._PROBE_SECONDS = hardware._LIVE_SECONDS = 0.01
print(hardware.live([gpu.uuid]).failed[gpu.uuid], hardware.live([gpu.uuid]).loads)
print(hardware.probe().nvml)
"""


def test_a_driver_that_hangs_holds_up_no_heartbeat_and_no_command(
    run_python: Any, simulated_nvml: Any, tmp_path: Path
) -> None:
    one = simulated_nvml("T4")
    env = {**one.env, "PYTHONPATH": str(Path(__file__).parents[3])}
    live, probed, *_ = run_python(HANGS_FOR_EVER, env, str(one.state)).splitlines()
    assert live == "the NVIDIA driver does not answer ()"
    assert probed == "the NVIDIA driver does not answer: nothing came within 0.01 s"


def test_with_the_simulated_driver(run_python: Any, simulated_nvml: Any, tmp_path: Path) -> None:
    before = simulated_nvml([SimGpu(), SimGpu()])
    notebook = simulated_nvml([SimGpu(processes=[(4242, 20_480)]), SimGpu()])
    lost = simulated_nvml([SimGpu(processes=[(4242, 20_480)]), SimGpu(lost=True)])
    states = [str(machine.state) for machine in (before, notebook, lost, notebook)]
    copy = simulated_nvml("2xA100-80GB")
    found = json.loads(run_python(SIMULATED, copy.env, str(tmp_path / "locks"), *states))
    first, second = gpu_uuid(0), gpu_uuid(1)
    assert found["shown"] == [
        [[first, 80], [second, 80]],
        [[first, 60], [second, 80]],
        [[first, 60]],
        [[first, 60], [second, 80]],
    ]
    assert (found["taken"], found["clean"]) == ([first], True)


def test_a_take_and_a_release_are_changes_that_the_next_look_sees_at_once(machine: Make) -> None:
    gpus = machine(FOUR)
    before, seen = gpus.change, (gpus.looked_at(), gpus.last_seen())

    hold = taken(gpus.claim(["GPU-0"]))
    after = gpus.change
    assert after is not before
    assert gpus.last_seen() == seen[1], "it looks at nothing"
    gpus.looked_at()
    assert gpus.last_seen() != seen[1]
    assert "GPU-0" not in {gpu.uuid for gpu in offered(gpus, FOUR).gpus}

    gpus.release(hold)
    assert gpus.change is not after
    gpus.looked_at()
    assert gpus.last_seen() == seen[1]
