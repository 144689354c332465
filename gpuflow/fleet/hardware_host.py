"""CPUs and memory that this process may use: the smaller of the machine and its control group.

Called by `gpuflow.fleet.hardware` alone. Linux control groups v2 and v1 are read; elsewhere the machine
counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_MIB: Final = 1024 * 1024
#: Of the PCI bus: NVIDIA, and display controllers (of a computing card too).
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"


@dataclass(frozen=True, kw_only=True)
class Host:
    """CPUs (whole ones, at least 1) and memory in MiB."""

    cpu_count: int
    memory_total_mib: int
    memory_available_mib: int


def read(root: Path = Path("/")) -> Host:
    """Read this machine; `root` is where /proc and /sys are looked for."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for quota in _cpu_quotas(root):
        cpus = min(cpus, quota)
    return Host(
        cpu_count=max(1, math.floor(cpus)),
        memory_total_mib=total // _MIB,
        memory_available_mib=available // _MIB,
    )


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU limit of every enclosing control group that has one."""
    for folder in _group_folders(root, ""):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])
    for folder in _group_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            yield quota / period


def has_nvidia_device(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the NVIDIA driver shows a device or, where no driver is loaded, the PCI bus does.

    A container sees the bus of its machine whether it may use the GPUs or not, so there the bus says nothing.
    """
    if (root / "dev/nvidia0").exists():
        return True
    if _is_container(root, environment):
        return False
    for device in root.glob("sys/bus/pci/devices/*"):
        if _text(device / "vendor").strip() == _NVIDIA and _text(device / "class").startswith(_DISPLAY):
            return True
    return False


def _is_container(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether this is a container: of Docker, Podman, Kubernetes, or one whose manager says so (systemd.exec(5))."""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(map(Path.exists, marks)) or bool({"container", "KUBERNETES_SERVICE_HOST"} & environment.keys())


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of every enclosing control group that has a limit.

    Used memory leaves out the inactive file cache, which the kernel gives back before it kills.
    """
    for controller, limit_file, usage_file, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _group_folders(root, controller):
            limit = _number(folder / limit_file)
            if limit is not None:
                cache = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
                used = (_number(folder / usage_file) or 0) - int(cache.get(cache_key, "0"))
                yield limit, max(0, used)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its parents; "" stands for version 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (names if names else "")
        if controller and not base.is_dir():
            base = root / "sys/fs/cgroup" / controller
        folder = base / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == base or base not in folder.parents:
                return
            folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
