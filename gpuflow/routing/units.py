"""Amounts as users type them: memory of a GPU, memory of the machine, CPUs.

Used by routing alone. GPU memory is the size on the box in GB, where GB, GiB and Gi all mean the same:
vendors print "24 GB" on a card of 24 GiB that reports 22.5 (the rest is reserved). Memory of the machine is
exact: Gi = 2**30, GB = 10**9 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_AMOUNT: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)")
_GPU_UNITS: Final = {"g": 1.0, "gb": 1.0, "gi": 1.0, "gib": 1.0, "t": 1024.0, "tb": 1024.0, "tib": 1024.0}
_GPU_UNITS_SMALL: Final = {"m": 1 / 1024, "mb": 1 / 1024, "mi": 1 / 1024, "mib": 1 / 1024}
_HOST_BYTES: Final = {
    "k": 10**3, "kb": 10**3, "ki": 2**10, "kib": 2**10, "m": 10**6, "mb": 10**6, "mi": 2**20, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gi": 2**30, "gib": 2**30, "t": 10**12, "tb": 10**12, "ti": 2**40, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryRange:
    """A range of memory on the box, in GB."""

    minimum: float | None
    maximum: float | None = None


def gpu_memory_range(text: str) -> MemoryRange | None:
    """Return "40GB", "40GB+", "24GB..80GB", "24GB.." or "..80GB", or None when it is no memory of a GPU.

    The unit may stand at the end of a range only: 24..80GB.
    """
    low, dots, high = text.strip().partition("..")
    if not dots:
        amount = gpu_memory_gb(text.strip().removesuffix("+"))
        return None if amount is None else MemoryRange(minimum=amount)
    if low and high and low.replace(".", "", 1).isdecimal():
        low += high.lstrip("0123456789. ")
    bounds = [gpu_memory_gb(part) if part.strip() else None for part in (low, high)]
    if (low.strip() and bounds[0] is None) or (high.strip() and bounds[1] is None) or bounds == [None, None]:
        return None
    return MemoryRange(minimum=bounds[0], maximum=bounds[1])


def gpu_memory_gb(text: str) -> float | None:
    """Return "40GB", "46Gi" or "500MB" in GB on the box, or None when it is no memory of a GPU."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    factor = {**_GPU_UNITS, **_GPU_UNITS_SMALL}.get(found[2].lower())
    return None if factor is None else float(found[1]) * factor


def host_memory_mib(text: str) -> int | None:
    """Return "32Gi" or "16GB" in MiB, rounded up, or None when it is no amount with a unit."""
    found = _AMOUNT.fullmatch(text.strip().removesuffix("+"))
    factor = _HOST_BYTES.get(found[2].lower()) if found else None
    if found is None or factor is None:
        return None
    return -int(-float(found[1]) * factor // 2**20)


def disk_gib(text: str) -> float | None:
    """Return "100GB" or "1Ti" of disk in GiB (a step of 1 MiB, rounded up), or None when it is no such amount."""
    mib = host_memory_mib(text)
    return None if mib is None else mib / 1024


def cpus(text: str) -> float | None:
    """Return "8", "0.5" or "500m" (thousandths) as a number of CPUs, or None."""
    found = _AMOUNT.fullmatch(text.strip().removesuffix("+"))
    if found is None or found[2] not in ("", "m"):
        return None
    return float(found[1]) / (1000 if found[2] else 1)


def show_gb(gigabytes: float) -> str:
    """Return GB for people: "80 GB", "22.5 GB"."""
    return f"{gigabytes:.4g} GB"


def show_mib(mebibytes: int) -> str:
    """Return MiB for people: "32 GiB", "512 MiB"."""
    return f"{mebibytes / 1024:.4g} GiB" if mebibytes >= 1024 else f"{mebibytes} MiB"
