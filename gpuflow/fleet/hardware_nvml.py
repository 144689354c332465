"""The one place that talks to the NVIDIA driver, through NVML (module pynvml of nvidia-ml-py).

Called by `gpuflow.fleet.hardware`, `gpuflow.fleet.gpu_usage` and `gpuflow.fleet.gpu_energy` only. NVML is initialised
once per process and never shut down; every call is safe from any thread. Every value is read on its own: what one GPU
cannot tell is None, a GPU that is lost becomes a problem, and the others are read all the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pynvml

from gpuflow.errors import GPUFlowError

_MIB: Final = 1024 * 1024
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One schedulable device: a whole GPU, or a MIG slice (`mig_parent_uuid` is set, `index` the parent's).

    `index` is the PCI order of nvidia-smi. Memory as the driver reports it, which is below the size on the
    box.
    """

    index: int
    uuid: str
    name: str
    total_mib: int
    free_mib: int
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_watts: float | None = None
    mig_parent_uuid: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """What changes on a GPU while it works."""

    uuid: str
    free_mib: int
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class Live:
    """The load of the GPUs asked for, and for each that could not be read the cause, by UUID."""

    loads: tuple[GpuLoad, ...]
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU: its id on the host, and its memory where the driver tells it."""

    pid: int
    used_mib: int | None


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Who uses the memory of a GPU. `used_mib` is without what the driver keeps for itself, where it tells that apart.

    `processes` is None where the driver does not list them; `uncorrected_errors` counts memory errors since the last
    reset, None without ECC.
    """

    uuid: str
    total_mib: int
    used_mib: int
    processes: tuple[GpuProcess, ...] | None
    uncorrected_errors: int | None = None


@dataclass(frozen=True, kw_only=True)
class Uses:
    """The use of the GPUs asked for, by UUID, and for each that could not be read the cause."""

    uses: Mapping[str, GpuUse]
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that NVML told. `nvml` says why there is nothing when the driver cannot be used."""

    gpus: tuple[Gpu, ...] = ()
    lost_indices: tuple[int, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    nvml: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the driver answered."""
        return self.nvml is None


class _Session:
    """Initialises NVML once per process; after a fork, once more in the child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None

    def open(self) -> None:
        """Raise pynvml.NVMLError when the driver cannot be used; it is tried again at the next call."""
        with self._lock:
            if self._pid != os.getpid():
                pynvml.nvmlInit()
                self._pid = os.getpid()


_session = _Session()


def read() -> Report:
    """Read every GPU and MIG slice. Never raises."""
    try:
        _session.open()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return _unusable(error)
    gpus: list[Gpu] = []
    lost: list[int] = []
    problems: list[str] = []
    for index in range(count):
        try:
            gpus.extend(_read_device(index, problems))
        except pynvml.NVMLError as error:
            lost.append(index)
            problems.append(f"GPU {index} is left out: {_cause(error)}")
    return Report(
        gpus=tuple(gpus),
        lost_indices=tuple(lost),
        driver_version=_text_or_none(pynvml.nvmlSystemGetDriverVersion),
        cuda_version=_cuda_version(),
        problems=tuple(problems),
    )


def read_live(uuids: Sequence[str]) -> Live:
    """Read the load of these devices. Never raises."""
    loads: list[GpuLoad] = []
    failed: dict[str, str] = {}
    for uuid in uuids:
        try:
            _session.open()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            loads.append(_read_load(handle, uuid))
        except pynvml.NVMLError as error:
            failed[uuid] = _cause(error)
    return Live(loads=tuple(loads), failed=failed)


def read_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Read who computes on this device. Raises GPUFlowError with the cause."""
    try:
        _session.open()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        raise GPUFlowError(f"cannot list the processes on {uuid}: {_cause(error)}") from error
    return _processes(found)


def read_uses(uuids: Sequence[str]) -> Uses:
    """Read who uses the memory of these devices. Never raises."""
    uses: dict[str, GpuUse] = {}
    failed: dict[str, str] = {}
    for uuid in uuids:
        try:
            _session.open()
            uses[uuid] = _read_use(pynvml.nvmlDeviceGetHandleByUUID(uuid), uuid)
        except pynvml.NVMLError as error:
            failed[uuid] = _cause(error)
    return Uses(uses=uses, failed=failed)


def read_energy(uuids: Sequence[str]) -> dict[str, float]:
    """Read the energy of these devices in joules, since the driver was loaded; without those that do not tell it.

    Never raises. NVML counts it in millijoules, from Volta on, and not for MIG slices.
    """
    joules: dict[str, float] = {}
    for uuid in uuids:
        with contextlib.suppress(pynvml.NVMLError):
            _session.open()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            joules[uuid] = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    return joules


def _read_use(handle: Any, uuid: str) -> GpuUse:
    memory = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    memory = memory or pynvml.nvmlDeviceGetMemoryInfo(handle)  # before driver 510
    found = _or_none(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    whole = _or_none(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
    errors = _or_none(
        lambda: pynvml.nvmlDeviceGetTotalEccErrors(
            whole, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    )
    return GpuUse(
        uuid=uuid,
        total_mib=int(memory.total) // _MIB,
        used_mib=int(memory.used) // _MIB,
        processes=None if found is None else _processes(found),
        uncorrected_errors=errors,
    )


def _processes(found: Sequence[Any]) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid=int(item.pid), used_mib=None if item.usedGpuMemory is None else item.usedGpuMemory // _MIB)
        for item in found
    )


def _read_device(index: int, problems: list[str]) -> list[Gpu]:
    """Return one GPU, or its slices when it is in MIG mode. Raises pynvml.NVMLError."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mode = _or_none(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
    if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [_read_gpu(handle, index)]
    parent = _text(pynvml.nvmlDeviceGetUUID(handle))
    slices: list[Gpu] = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError_NotFound:
            continue
        slices.append(_read_gpu(part, index, parent=parent, parent_handle=handle))
    if not slices:
        problems.append(
            f"GPU {index} ({parent}) is in MIG mode but has no slices; create some (`nvidia-smi mig -cgi`) "
            "or switch MIG mode off"
        )
    return slices


def _read_gpu(handle: Any, index: int, parent: str | None = None, parent_handle: Any = None) -> Gpu:
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    load = _read_load(handle, uuid)
    capability = _or_none(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(parent_handle or handle))
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB,
        free_mib=load.free_mib,
        utilization_percent=load.utilization_percent,
        temperature_c=load.temperature_c,
        power_watts=load.power_watts,
        mig_parent_uuid=parent,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
    )


def _read_load(handle: Any, uuid: str) -> GpuLoad:
    milliwatts = _or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    return GpuLoad(
        uuid=uuid,
        free_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) // _MIB,
        utilization_percent=_or_none(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        temperature_c=_or_none(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        power_watts=None if milliwatts is None else milliwatts / 1000,
    )


def _or_none(call: Callable[[], _T]) -> _T | None:
    """Return the value, or None where this device cannot tell it; a lost GPU, or one to be reset, still raises."""
    try:
        return call()
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired):
        raise
    except pynvml.NVMLError:
        return None


def _text_or_none(call: Callable[[], Any]) -> str | None:
    value = _or_none(call)
    return None if value is None else _text(value)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _cuda_version() -> str | None:
    """Return the newest CUDA that the driver supports; NVML gives 1000 * major + 10 * minor."""
    number = _or_none(pynvml.nvmlSystemGetCudaDriverVersion)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _unusable(error: Any) -> Report:
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return Report(nvml="no NVIDIA driver on this machine")
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        return Report(nvml="the NVIDIA driver is installed but not loaded")
    cause = _cause(error)
    return Report(nvml=f"the NVIDIA driver does not answer: {cause}", problems=(f"NVML: {cause}",))


def _cause(error: Any) -> str:
    """Return the cause with its mend, for the errors that an operator meets."""
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        return "the GPU is lost (it fell off the bus); reset it or reboot the machine"
    if isinstance(error, pynvml.NVMLError_ResetRequired):
        return "the GPU has to be reset (`nvidia-smi --gpu-reset`)"
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return "driver and library have different versions (after an update); reboot the machine"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "no permission for the device files; check the user's groups or the container's devices"
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return "no NVIDIA driver on this machine"
    if isinstance(error, pynvml.NVMLError_NotFound):
        return "the driver knows no such device any more"
    if isinstance(error, pynvml.NVMLError_NotSupported):
        return "the driver cannot tell its memory"
    return str(error)
