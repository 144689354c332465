"""Which GPUs a list such as CUDA_VISIBLE_DEVICES or `--gpus` names. Pure.

Called by `gpuflow.fleet.hardware` alone. Follows the rules of the CUDA programming guide: indices, full or
abbreviated UUIDs, MIG UUIDs; an empty list means none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuflow.fleet.hardware_nvml import Gpu


class UnknownDeviceError(Exception):
    """An entry of the list names no device; `entry` is that entry."""

    def __init__(self, entry: str, cause: str) -> None:
        super().__init__(f"{entry!r} {cause}")
        self.entry = entry


@dataclass(frozen=True, kw_only=True)
class Restricted:
    """The devices that a list leaves, and what was wrong with the list."""

    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...] = ()


def restrict(gpus: tuple[Gpu, ...], visible: str | None, lost_indices: tuple[int, ...] = ()) -> Restricted:
    """Apply CUDA_VISIBLE_DEVICES: None = all, "" = none, and the list ends at the first entry that is wrong.

    The devices keep the order of the list. An index or UUID of a GPU in MIG mode stands for all its slices.
    The index of a lost GPU, and while one is lost an unknown UUID, is skipped: one lost GPU does not hide
    the others.
    """
    if visible is None:
        return Restricted(gpus=gpus)
    kept: list[Gpu] = []
    for entry in _entries(visible):
        try:
            found = find(gpus, entry)
        except UnknownDeviceError as error:
            if entry == "-1":
                return Restricted(gpus=tuple(kept))
            if _may_be_lost(entry, lost_indices):
                continue
            return Restricted(
                gpus=tuple(kept),
                problems=(f"CUDA_VISIBLE_DEVICES={visible}: {error}; CUDA ends the list there, and so do we",),
            )
        if any(gpu in kept for gpu in found):
            return Restricted(
                gpus=tuple(kept),
                problems=(f"CUDA_VISIBLE_DEVICES={visible}: {entry!r} is named twice; the list ends there",),
            )
        kept.extend(found)
    return Restricted(gpus=tuple(kept))


def pick(gpus: tuple[Gpu, ...], only: str) -> tuple[Gpu, ...]:
    """Apply `--gpus`, which must name known devices; they keep their own order. Raises UnknownDeviceError."""
    wanted = [gpu for entry in _entries(only) for gpu in find(gpus, entry)]
    return tuple(gpu for gpu in gpus if gpu in wanted)


def find(gpus: tuple[Gpu, ...], entry: str) -> tuple[Gpu, ...]:
    """Return the device, or the slices of the GPU, that one entry names. Raises UnknownDeviceError."""
    if entry.isdecimal():
        found = tuple(gpu for gpu in gpus if gpu.index == int(entry))
        if not found:
            raise UnknownDeviceError(entry, "is not the index of a usable GPU")
        return found
    if not entry.startswith(("GPU-", "MIG-")) or len(entry) <= len("GPU-"):
        raise UnknownDeviceError(entry, "is neither an index nor a UUID")
    slices = tuple(gpu for gpu in gpus if (gpu.mig_parent_uuid or "").startswith(entry))
    whole = tuple(gpu for gpu in gpus if gpu.uuid.startswith(entry))
    owners = {gpu.uuid for gpu in whole} | {gpu.mig_parent_uuid for gpu in slices}
    if not owners:
        raise UnknownDeviceError(entry, "is not the UUID of a usable GPU")
    if len(owners) > 1:
        raise UnknownDeviceError(entry, "is the beginning of several UUIDs")
    return whole + slices


def _may_be_lost(entry: str, lost_indices: tuple[int, ...]) -> bool:
    if entry.isdecimal():
        return int(entry) in lost_indices
    return bool(lost_indices) and entry.startswith(("GPU-", "MIG-"))


def _entries(text: str) -> list[str]:
    if not text.strip():
        return []
    return [part.strip() for part in text.split(",")]
