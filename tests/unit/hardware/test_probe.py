"""The probe against simulated machines: the real pynvml, in a process of its own."""

import json

import pytest

from gpuflow.fleet import hardware
from tests.fixtures.simulated_nvml import SimGpu, gpu_uuid, mig_uuid


def uuids(found):
    return [gpu["uuid"] for gpu in found["gpus"]]


def test_no_driver_is_a_fact(probed):
    found = probed({"LD_LIBRARY_PATH": ""})
    assert found["gpus"] == []
    assert found["nvml"] == "no NVIDIA driver on this machine"
    assert found["problems"] == []
    assert found["driver_version"] is None
    assert found["cpu_count"] >= 1
    assert found["memory_total_mib"] >= found["memory_available_mib"] > 0
    assert found["hostname"]


def test_a_driver_that_is_not_loaded_is_a_fact(probed, simulated_nvml):
    machine = simulated_nvml("T4")
    machine.state.unlink()
    found = probed(machine.env)
    assert found["nvml"] == "the NVIDIA driver is installed but not loaded"
    assert found["problems"] == []


def test_four_a100(probed, simulated_nvml):
    found = probed(simulated_nvml("4xA100-80GB").env)
    assert uuids(found) == [gpu_uuid(index) for index in range(4)]
    assert found["gpus"][1] == {
        "index": 1,
        "uuid": gpu_uuid(1),
        "name": "NVIDIA A100-SXM4-80GB",
        "total_mib": 81920,
        "free_mib": 81920,
        "utilization_percent": 0,
        "temperature_c": 35,
        "power_watts": 60.0,
        "mig_parent_uuid": None,
        "compute_capability": "8.0",
    }
    assert (found["driver_version"], found["cuda_version"]) == ("999.0.0-simulated", "13.0")
    assert (found["nvml"], found["problems"]) == (None, [])


def test_a_driver_without_gpus_finds_none(probed, simulated_nvml):
    found = probed(simulated_nvml("").env)
    assert (found["gpus"], found["nvml"], found["problems"]) == ([], None, [])


def test_load_is_read(probed, simulated_nvml):
    card = SimGpu(model="L4", used_mib=3000, utilization_percent=87, temperature_c=71, power_mw=71_500)
    (gpu,) = probed(simulated_nvml([card]).env)["gpus"]
    assert gpu["free_mib"] == 23034 - 3000
    assert (gpu["utilization_percent"], gpu["temperature_c"], gpu["power_watts"]) == (87, 71, 71.5)


def test_a_lost_gpu_hides_no_other(probed, simulated_nvml):
    machine = simulated_nvml([SimGpu(), SimGpu(lost=True), SimGpu()])
    found = probed(machine.env)
    assert uuids(found) == [gpu_uuid(0), gpu_uuid(2)]
    assert len(found["problems"]) == 1
    assert "GPU 1 is left out" in found["problems"][0]
    assert "lost" in found["problems"][0]
    assert uuids(probed(machine.env, visible="0,1,2")) == [gpu_uuid(0), gpu_uuid(2)]
    assert uuids(probed(machine.env, visible=",".join(gpu_uuid(i) for i in range(3)))) == uuids(found)


def test_slices_stand_for_a_gpu_in_mig_mode(probed, simulated_nvml):
    machine = simulated_nvml([SimGpu(), SimGpu(slices=["3g.40gb", "1g.10gb"]), SimGpu(mig=True)])
    found = probed(machine.env)
    assert uuids(found) == [gpu_uuid(0), mig_uuid(1, 0), mig_uuid(1, 1)]
    part = found["gpus"][1]
    assert part["mig_parent_uuid"] == gpu_uuid(1)
    assert part["name"] == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert (part["total_mib"], part["utilization_percent"], part["power_watts"]) == (40192, None, None)
    assert len(found["problems"]) == 1
    assert "GPU 2" in found["problems"][0]
    assert "no slices" in found["problems"][0]
    assert uuids(probed(machine.env, visible=mig_uuid(1, 1))) == [mig_uuid(1, 1)]
    assert uuids(probed(machine.env, visible="1")) == [mig_uuid(1, 0), mig_uuid(1, 1)]


def test_the_workers_own_environment_restricts(probed, simulated_nvml):
    machine = simulated_nvml("4xA100-80GB")
    assert uuids(probed({**machine.env, "CUDA_VISIBLE_DEVICES": "3,1"})) == [gpu_uuid(3), gpu_uuid(1)]
    assert uuids(probed({**machine.env, "CUDA_VISIBLE_DEVICES": ""})) == []
    assert len(uuids(probed({**machine.env, "CUDA_VISIBLE_DEVICES": "3"}, visible=None))) == 4


def test_gpus_option_chooses_among_the_visible(probed, simulated_nvml):
    machine = simulated_nvml("4xA100-80GB")
    assert uuids(probed(machine.env, only="2,0")) == [gpu_uuid(0), gpu_uuid(2)]
    assert uuids(probed(machine.env, only="all")) == [gpu_uuid(i) for i in range(4)]
    assert uuids(probed(machine.env, only="")) == []
    assert uuids(probed(machine.env, visible="1,2", only=gpu_uuid(2))) == [gpu_uuid(2)]


REFUSED = """
import sys
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.hardware import probe
try:
    probe(visible=None if sys.argv[1] == "-" else sys.argv[1], only=sys.argv[2])
except GPUFlowError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("visible", "only", "fragments"),
    [
        ("-", "7", ["--gpus 7", "'7' is not the index", "0 (NVIDIA L4, GPU-"]),
        ("-", "0,x", ["'x' is neither an index nor a UUID"]),
        ("-", "GPU-beef", ["'GPU-beef' is not the UUID"]),
        ("-", "GPU-0000000", ["beginning of several UUIDs"]),
        ("0", "1", ["CUDA_VISIBLE_DEVICES hides GPU-00000001"]),
        ("", "0", ["CUDA_VISIBLE_DEVICES hides GPU-00000000"]),
    ],
)
def test_an_unknown_gpu_is_refused(run_python, simulated_nvml, visible, only, fragments):
    message = run_python(REFUSED, simulated_nvml("2xL4").env, visible, only)
    assert message.count("\n") == 1
    for fragment in fragments:
        assert fragment in message


def test_asking_for_gpus_without_a_driver_is_refused(run_python):
    message = run_python(REFUSED, {"LD_LIBRARY_PATH": ""}, "-", "0")
    assert "no NVIDIA driver" in message


LIVE = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from gpuflow.fleet.hardware import compute_processes, live, probe, with_load
from gpuflow.errors import GPUFlowError

hardware = probe()
names = [gpu.uuid for gpu in hardware.gpus]
before = live(names)
state = Path(os.environ["FAKE_NVML_STATE"])
state.write_text(Path(sys.argv[1]).read_text())
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(lambda _: live(names), range(50)))
assert all(result == results[0] for result in results)
after = with_load(hardware, results[0])
try:
    compute_processes(names[1])
except GPUFlowError as error:
    refused = str(error)
print(json.dumps({
    "before": [load.free_mib for load in before.loads],
    "failed": dict(results[0].failed),
    "after": after.to_dict(),
    "processes": [asdict(process) for process in compute_processes(names[0])],
    "refused": refused,
}))
"""


def test_live_follows_a_machine_that_changes(run_python, simulated_nvml):
    later = simulated_nvml([SimGpu(used_mib=1920, utilization_percent=50, processes=[(4242, 1900)]), SimGpu(lost=True)])
    found = json.loads(run_python(LIVE, simulated_nvml("2xA100-80GB").env, str(later.state)))
    assert found["before"] == [81920, 81920]
    assert list(found["failed"]) == [gpu_uuid(1)]
    assert "lost" in found["failed"][gpu_uuid(1)]
    assert uuids(found["after"]) == [gpu_uuid(0)]
    assert found["after"]["gpus"][0]["free_mib"] == 80000
    assert found["after"]["gpus"][0]["utilization_percent"] == 50
    assert any(gpu_uuid(1) in problem for problem in found["after"]["problems"])
    assert found["processes"] == [{"pid": 4242, "used_mib": 1900}]
    assert "lost" in found["refused"]


def test_the_probe_imports_nothing_heavy(run_python):
    loaded = run_python("import gpuflow.fleet.hardware, sys; print(' '.join(sys.modules))", {}).split()
    assert {"torch", "transformers", "celery", "redis"}.isdisjoint(loaded)
    assert hardware.__all__
