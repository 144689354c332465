"""GPU memory that a session holds: what its GPUs had free before loading, less what they have free after.

Read by NVML, so that the process itself opens no GPU: vLLM's engine is another process. Without NVML: no figure.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType


def used_bytes(gpus: Sequence[str]) -> int | None:
    """Return the memory in use on GPUs, in bytes; `gpus` are UUIDs, none of them means no figure."""
    nvml = _library() if gpus else None
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
            return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def grown_bytes(before: int | None, after: int | None) -> int | None:
    """Return how much more is in use than before; None where one of the figures is missing."""
    return None if before is None or after is None else max(0, after - before)


def _library() -> ModuleType | None:
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
