"""Memory of GPUs: what is in use, of which a session's part is what grew while it loaded, and how much there is.

Read by NVML, so that the process itself opens no GPU: vLLM's engine is another process. Without NVML: no figure.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def used_bytes(gpus: Sequence[str]) -> int | None:
    """Return the memory in use on GPUs, in bytes; `gpus` are UUIDs, none of them means no figure."""
    found = _memory(gpus)
    return None if found is None else sum(int(one.used) for one in found)


def total_mib(gpus: Sequence[str]) -> int | None:
    """Return the memory of the smallest of GPUs, in MiB; None without NVML or GPUs."""
    found = _memory(gpus)
    return None if found is None else min(int(one.total) for one in found) >> 20


def grown_bytes(before: int | None, after: int | None) -> int | None:
    """Return how much more is in use than before; None where one of the figures is missing."""
    return None if before is None or after is None else max(0, after - before)


def _memory(gpus: Sequence[str]) -> list[Any] | None:
    nvml = _library() if gpus else None
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            return [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu)) for gpu in gpus]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _library() -> ModuleType | None:
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
