"""Asks, amounts and times in words, for `explain` and for warnings. Pure text; it decides nothing."""

from __future__ import annotations

from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import show_gb, show_mib


def describe(ask: Requirement) -> str:
    """Return what is asked for in one line: `2 GPUs (a100), 80 GB or more each; 8 CPUs; label team=nlp`."""
    parts = [_gpus(ask)]
    if ask.cpu is not None:
        parts.append("1 CPU" if ask.cpu == 1 else f"{ask.cpu:g} CPUs")
    if ask.memory_mib is not None:
        parts.append(f"{show_mib(ask.memory_mib)} of memory")
    if ask.disk_gib is not None:
        parts.append(f"{show_mib(round(ask.disk_gib * 1024))} of free disk")
    parts += [f"label {key}={glob}" if glob else f"label {key}" for key, glob in ask.labels]
    return "; ".join(parts)


def ago(seconds: float) -> str:
    """Return a time span as people say it: 40 s, 12 min, 3 h 20 min, 2 days."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        hours, minutes = divmod(whole // 60, 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{whole // 86400} days"


def _gpus(ask: Requirement) -> str:
    if not ask.gpu_count:
        return "no GPU"
    if ask.gpu_shared:
        text = f"a share of {show_gb(ask.vram_gb_min or 0)} of a GPU"
    elif ask.gpu_share is not None:
        text = f"{ask.gpu_share * 100:g} % of a GPU"
    elif ask.gpu_count_max is not None:
        text = f"{ask.gpu_count} to {ask.gpu_count_max} GPUs"
    else:
        text = "1 GPU" if ask.gpu_count == 1 else f"{ask.gpu_count} GPUs"
    if ask.gpu_names:
        text += f" ({' or '.join(ask.gpu_names)})"
    low, high = (None if ask.gpu_shared else ask.vram_gb_min), ask.vram_gb_max
    each = " each" if ask.gpu_count > 1 or ask.gpu_count_max else ""
    if low is not None and high is not None:
        text += f", {low:.4g} to {show_gb(high)}{each}"
    elif low is not None:
        text += f", {show_gb(low)} or more{each}"
    elif high is not None:
        text += f", {show_gb(high)} or less{each}"
    if ask.compute_capability_min is not None:
        text += f", compute capability {ask.compute_capability_min} or more"
    return text
