"""Foreign memory and lost GPUs, from the simulated driver and from plain figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpuflow.fleet import gpu_usage
from gpuflow.fleet.gpu_usage import UsageReader, alive, below_a_shim, foreign_mib, of_a_shim, usage, wait_clean
from gpuflow.fleet.hardware_nvml import GpuProcess, GpuUse, Uses
from gpuflow.worker import shim
from tests.fixtures.simulated_nvml import SimGpu, gpu_uuid, mig_uuid

OURS, THEIRS, UNSEEN = 1, 2, 3
KINDS: dict[int, bool | None] = {OURS: True, THEIRS: False, UNSEEN: None}


def use(used: int, *processes: tuple[int, int | None], listed: bool = True, errors: int | None = 0) -> GpuUse:
    return GpuUse(
        uuid="GPU-0",
        total_mib=80_000,
        used_mib=used,
        processes=tuple(GpuProcess(pid=pid, used_mib=mib) for pid, mib in processes) if listed else None,
        uncorrected_errors=errors,
    )


def reading(*answers: GpuUse | str) -> Any:
    """Return a driver that gives these answers in turn, the last one for ever; a string is why it cannot."""
    left = list(answers)

    def read(uuids: Any) -> Uses:
        now = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(now, str):
            return Uses(uses={}, failed=dict.fromkeys(uuids, now))
        return Uses(uses=dict.fromkeys(uuids, now))

    return read


@pytest.mark.parametrize(
    ("promised", "seen", "foreign"),
    [
        (0, use(0), 0),
        (0, use(300), 300),  # a desktop that computes nothing
        (0, use(9000, (OURS, 9000)), 9000),  # the ledger knows nothing of it, so it is not ours
        (0, use(0, (THEIRS, 9000)), 9000),
        (0, use(9000, listed=False), 9000),
        (0, use(9000, (UNSEEN, None)), 9000),
        (20_000, use(15_000, (OURS, 5000), (THEIRS, 10_000)), 10_000),
        (20_000, use(15_000, (OURS, 15_000)), 0),
        (20_000, use(25_000, (OURS, 25_000)), 0),  # more than it asked for is its own all the same
        (20_000, use(33_000, (OURS, 5000), (THEIRS, 10_000)), 13_000),
        (20_000, use(26_000, (UNSEEN, 26_000)), 6000),
        (20_000, use(26_000, (OURS, None), (THEIRS, 10_000)), 6000),
        (20_000, use(26_000, listed=False), 6000),
        (20_000, use(4000, listed=False), 0),
    ],
)
def test_foreign_memory(promised: int, seen: GpuUse, foreign: int) -> None:
    assert foreign_mib(seen, promised, KINDS.__getitem__) == foreign


def test_promises_that_nobody_uses_yet_hide_no_foreign_memory() -> None:
    for seen in (use(3000, listed=False), use(3000, (UNSEEN, 3000)), use(3000, (OURS, None))):
        assert foreign_mib(seen, 20_000, KINDS.__getitem__) == 0
        assert foreign_mib(seen, 20_000, KINDS.__getitem__, 2000) == 2000
        assert foreign_mib(seen, 20_000, KINDS.__getitem__, 5000) == 3000, "it went, at least in part"
    assert foreign_mib(use(3000, (OURS, 3000)), 20_000, KINDS.__getitem__, 2000) == 0, "it is known that it went"


def test_nobody_asks_for_the_foreign_memory_of_a_gpu_that_is_held_whole() -> None:
    found = usage({"GPU-0": None}, read=reading(use(70_000, (THEIRS, 70_000))), is_ours=KINDS.__getitem__)
    assert (found["GPU-0"].foreign_mib, found["GPU-0"].used_mib, found["GPU-0"].pids) == (0, 70_000, {THEIRS})


def test_a_gpu_with_memory_errors_is_taken_out() -> None:
    assert usage({"GPU-0": 0}, read=reading(use(0, errors=None)))["GPU-0"].lost is None
    lost = usage({"GPU-0": 0}, read=reading(use(0, errors=2)))["GPU-0"].lost
    assert lost is not None
    assert "2 uncorrectable" in lost


SIMULATED = """
import json, sys
from dataclasses import asdict
from gpuflow.fleet.gpu_usage import usage
print(json.dumps({u: {**asdict(one), "pids": sorted(one.pids)} for u, one in usage(json.loads(sys.argv[1])).items()}))
"""


def test_the_driver_tells_foreign_processes_slices_and_what_is_lost(run_python: Any, simulated_nvml: Any) -> None:
    machine = simulated_nvml(
        [
            SimGpu(processes=[(4242, 30_000)]),
            SimGpu(processes=[(4243, None)], used_mib=700),
            SimGpu(lost=True),
            SimGpu(ecc_errors=1),
            SimGpu(slices=["3g.40gb", "1g.10gb"], processes=[(4244, 2000, 1)], ecc_errors=0),
        ]
    )
    slices = [mig_uuid(4, number) for number in range(2)]
    asked = dict.fromkeys([*(gpu_uuid(index) for index in range(4)), *slices, "GPU-unknown"], 0)
    found = json.loads(run_python(SIMULATED, machine.env, json.dumps(asked)))
    assert list(found) == list(asked)
    told = [(one["foreign_mib"], one["pids"], bool(one["lost"])) for one in found.values()]
    assert told == [
        (30_000, [4242], False),
        (700, [4243], False),
        (0, [], True),
        (0, [], True),
        (0, [], False),
        (2000, [4244], False),
        (0, [], True),
    ]
    assert "fell off the bus" in found[gpu_uuid(2)]["lost"]
    assert "uncorrectable" in found[gpu_uuid(3)]["lost"]
    assert "no such device" in found["GPU-unknown"]["lost"]
    assert found[slices[1]]["total_mib"] == 9728


def test_a_slice_is_lost_with_its_gpu(run_python: Any, simulated_nvml: Any) -> None:
    for card in (SimGpu(slices=["1g.10gb"], lost=True), SimGpu(slices=["1g.10gb"], ecc_errors=3)):
        found = json.loads(run_python(SIMULATED, simulated_nvml([card]).env, json.dumps({mig_uuid(0, 0): 0})))
        assert found[mig_uuid(0, 0)]["lost"]


def test_without_a_driver_every_gpu_is_lost(run_python: Any) -> None:
    found = json.loads(run_python(SIMULATED, {"LD_LIBRARY_PATH": ""}, json.dumps({"GPU-0": 0})))
    assert found["GPU-0"]["lost"] == "no NVIDIA driver on this machine"


def test_what_runs_below_a_shim_is_ours(tmp_path: Path) -> None:
    body = "import subprocess, sys; subprocess.run(['sh', '-c', 'echo $$; read line'])"
    script = tmp_path / "gpuflow" / "worker" / "shim.py"
    script.parent.mkdir(parents=True)
    script.write_text(body)
    assert Path(str(shim.__file__)).match("gpuflow/worker/shim.py")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert below_a_shim(grandchild) is True
        process.communicate(b"\n")
    assert below_a_shim(os.getpid()) is False
    assert below_a_shim(grandchild) is None
    assert alive(os.getpid())
    assert not alive(grandchild)


def test_ids_of_another_namespace_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_usage, "_FIRST_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    assert of_a_shim(os.getpid()) is False
    monkeypatch.setattr(gpu_usage, "_FIRST_NAMESPACE", 1)
    assert of_a_shim(os.getpid()) is None


def test_a_driver_that_hangs_keeps_nobody() -> None:
    goes_on, asked = threading.Event(), []

    def read(uuids: Any) -> Uses:
        asked.append(uuids)
        goes_on.wait(30)
        return Uses(uses={"GPU-0": use(5)})

    reader = UsageReader(read)
    assert reader.read({}, 0) == {}
    assert reader.read({"GPU-0": 0}, 0.01) is None
    assert reader.read({"GPU-0": 0}, 30) is None, "it is not asked again while it hangs"
    assert len(asked) == 1
    stuck = reader._driver._stuck
    goes_on.set()
    assert stuck is not None
    stuck.join(30)
    found = reader.read({"GPU-0": 0}, 30)
    assert found is not None
    assert found["GPU-0"].used_mib == 5


def test_a_gpu_is_clean_when_its_processes_and_their_memory_are_gone() -> None:
    def wait(*answers: GpuUse | str, most: int | None = None, seconds: float = 30) -> dict[str, str]:
        limits = None if most is None else {"GPU-0": most}
        reader = UsageReader(reading(*answers))
        return wait_clean(["GPU-0"], {7, 8}, time.monotonic() + seconds, most_mib=limits, reader=reader)

    assert wait(use(0)) == {}
    assert wait(use(9, (7, 9)), use(9, (9, 9), (8, None)), use(9, (9, 9))) == {}
    assert wait(use(900), use(800), use(500), most=512) == {}
    assert wait("the GPU is lost") == {}
    assert wait(use(9, (8, 9), (7, 9)), seconds=0) == {"GPU-0": "process 7, 8 is still on it"}
    assert wait(use(900), most=512, seconds=0) == {"GPU-0": "900 MiB are still in use"}


def test_a_driver_that_hangs_is_not_waited_for_beyond_the_deadline() -> None:
    goes_on = threading.Event()

    def read(_uuids: Any) -> Uses:
        goes_on.wait(30)
        return Uses(uses={})

    left = wait_clean(["GPU-0"], {7}, time.monotonic(), reader=UsageReader(read))
    goes_on.set()
    assert left == {"GPU-0": "the driver does not answer"}
