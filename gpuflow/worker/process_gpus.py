"""The GPUs of this process alone, for a machine with one worker."""

from __future__ import annotations

from dataclasses import dataclass

from gpuflow.routing.capability import Capability


@dataclass(frozen=True, kw_only=True)
class ProcessHold:
    """GPUs that are taken."""

    uuids: tuple[str, ...]
    fds: tuple[int, ...] = ()


class ProcessGpus:
    """Takes GPUs within this process."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def free(self, capability: Capability) -> Capability:
        """Return the capability with its free GPUs alone."""
        return capability.only([gpu.uuid for gpu in capability.gpus if gpu.uuid not in self._taken])

    def take(self, uuids: tuple[str, ...]) -> ProcessHold | None:
        """Take all of them or none."""
        if self._taken.intersection(uuids):
            return None
        self._taken.update(uuids)
        return ProcessHold(uuids=uuids)

    def release(self, hold: ProcessHold) -> None:
        """Give them back."""
        self._taken.difference_update(hold.uuids)
