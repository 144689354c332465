"""What this machine has: GPUs, CPUs, memory. Facts only, never a mock.

Called by the worker (at start and at each heartbeat) and by `gpuflow hardware` and `gpuflow doctor`. It
knows nothing of queues, requirements or Redis. `probe()` reads everything; `live()` refreshes what changes.
A machine without a GPU is a fact (`Hardware.nvml` says why), not an error; one lost GPU does not hide the
others.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.fleet import hardware_host, hardware_nvml
from gpuflow.fleet.driver_calls import DriverCalls
from gpuflow.fleet.hardware_nvml import Gpu, GpuLoad, GpuProcess, Live
from gpuflow.fleet.hardware_visible import UnknownDeviceError, pick, restrict

__all__ = [
    "Gpu",
    "GpuLoad",
    "GpuProcess",
    "Hardware",
    "Live",
    "compute_processes",
    "live",
    "probe",
    "with_load",
]

#: Means "read CUDA_VISIBLE_DEVICES of this process"; None means "no restriction".
FROM_ENVIRONMENT: Final = "\0environment"

#: A driver that has not answered in this time hangs; the first program after a boot makes it wake each GPU.
_PROBE_SECONDS: Final = 45.0
#: A heartbeat waits this long for the load of the GPUs.
_LIVE_SECONDS: Final = 2.0
_DRIVER: Final = DriverCalls()
_LOADS: Final = DriverCalls()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a worker on this machine may use.

    `gpus` are the schedulable devices in PCI order: whole GPUs, and MIG slices instead of their parent.
    `nvml` says why there are none when the driver is not there; `problems` are what an operator should
    mend, one line each.
    """

    gpus: tuple[Gpu, ...]
    cpu_count: int
    memory_total_mib: int
    memory_available_mib: int
    hostname: str
    driver_version: str | None = None
    cuda_version: str | None = None
    nvml: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def driver_problem(self) -> str:
        """Why the NVIDIA devices of this machine cannot be used; "": one can, there is none, or none is to be used."""
        if self.gpus or not self.nvml or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return ""
        return self.nvml if has_device() else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def has_device() -> bool:
    """Whether this machine has an NVIDIA device, whatever the driver and its library say."""
    return hardware_host.has_nvidia_device()


def probe(visible: str | None = FROM_ENVIRONMENT, only: str | None = None) -> Hardware:
    """Read the hardware of this machine.

    `visible` is CUDA_VISIBLE_DEVICES (by default that of this process; None = not set): as in CUDA, the
    list ends at the first entry that names no device, and `problems` says so. `only` is `--gpus`, in the
    same syntax, and chooses among what is visible. Indices count in PCI order. Raises GPUFlowError when
    `only` names an unknown GPU.
    """
    if visible == FROM_ENVIRONMENT:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    report = _DRIVER.ask(hardware_nvml.read, _PROBE_SECONDS) or _silent_for(_PROBE_SECONDS)
    problems = list(report.problems)
    chosen = restrict(report.gpus, visible, report.lost_indices)
    gpus = chosen.gpus
    if report.found:
        problems += chosen.problems
    if only is not None and only.strip() != "all":
        gpus = _only(only, gpus, report)
    host = hardware_host.read()
    return Hardware(
        gpus=gpus,
        cpu_count=host.cpu_count,
        memory_total_mib=host.memory_total_mib,
        memory_available_mib=host.memory_available_mib,
        hostname=platform.node(),
        driver_version=report.driver_version,
        cuda_version=report.cuda_version,
        nvml=report.nvml,
        problems=tuple(problems),
    )


def live(uuids: Sequence[str]) -> Live:
    """Refresh what changes (free memory, utilisation, temperature, power) for these GPUs or MIG slices.

    A GPU that cannot be read is left out of `loads` and named in `failed` with the cause. Never raises, and waits for
    a driver that hangs for a moment only, at the first time.
    """
    found = _LOADS.ask(lambda: hardware_nvml.read_live(uuids), _LIVE_SECONDS)
    return found or Live(loads=(), failed=dict.fromkeys(uuids, "the NVIDIA driver does not answer"))


def _silent_for(seconds: float) -> hardware_nvml.Report:
    why = f"the NVIDIA driver does not answer: nothing came within {seconds:g} s"
    return hardware_nvml.Report(nvml=why, problems=(f"{why}; see `dmesg`, and restart the machine",))


def compute_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes that compute on this GPU, as the driver sees them (host process ids).

    Raises GPUFlowError when the GPU cannot be asked.
    """
    return hardware_nvml.read_processes(uuid)


def _only(only: str, visible: tuple[Gpu, ...], report: hardware_nvml.Report) -> tuple[Gpu, ...]:
    if not report.found:
        if not only.strip():
            return ()
        raise GPUFlowError(f"--gpus {only} asks for GPUs, but {report.nvml}; start the worker without --gpus")
    try:
        return pick(visible, only)
    except UnknownDeviceError as error:
        message = f"--gpus {only}: {error}"
        try:
            hidden = pick(report.gpus, error.entry)
        except UnknownDeviceError:
            have = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in visible) or "none"
            raise GPUFlowError(f"{message}; usable GPUs here: {have}") from None
        raise GPUFlowError(
            f"{message} because CUDA_VISIBLE_DEVICES hides {hidden[0].uuid}; "
            "name a visible GPU or change CUDA_VISIBLE_DEVICES"
        ) from None


def with_load(hardware: Hardware, current: Live) -> Hardware:
    """Return the hardware with a fresh load; GPUs that failed are dropped and named in `problems`."""
    loads = {load.uuid: load for load in current.loads}
    kept = tuple(
        replace(
            gpu,
            free_mib=loads[gpu.uuid].free_mib,
            utilization_percent=loads[gpu.uuid].utilization_percent,
            temperature_c=loads[gpu.uuid].temperature_c,
            power_watts=loads[gpu.uuid].power_watts,
        )
        for gpu in hardware.gpus
        if gpu.uuid in loads
    )
    lost = tuple(f"{uuid}: {cause}" for uuid, cause in current.failed.items())
    return replace(hardware, gpus=kept, problems=hardware.problems + lost)
