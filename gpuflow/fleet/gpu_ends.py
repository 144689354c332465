"""When the tasks that have whole GPUs of this machine end at the latest, as their workers have said.

Used by the GPU locks alone, which holds the mutex of the machine meanwhile. One file in the lock directory: it serves
to plan (`worker.reserving`), nothing is given out by it, so one that cannot be read counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuflow.fleet.gpu_directory import LockDirectory

_NAME: Final = "ends.json"


class _Ends(BaseModel):
    """GPU -> seconds of `boot_seconds()`. Those from before a reboot lie in the future or the past; neither harms."""

    model_config = ConfigDict(extra="ignore")

    gpus: dict[str, float] = {}


def read_ends(directory: LockDirectory) -> dict[str, float]:
    """Return what is known; what is left of holders that have gone is among it. Raises GPUFlowError."""
    try:
        return _Ends.model_validate_json(directory.read(_NAME) or b"{}").gpus
    except ValidationError:
        return {}


def note_end(directory: LockDirectory, uuids: Sequence[str], end: float | None) -> None:
    """Note when these GPUs are free at the latest; None: nobody can tell. Raises GPUFlowError."""
    known = read_ends(directory)
    if end is None and known.keys().isdisjoint(uuids):
        return
    rest = {uuid: at for uuid, at in known.items() if uuid not in uuids}
    noted = rest if end is None else {**rest, **dict.fromkeys(uuids, end)}
    directory.write(_NAME, _Ends(gpus=noted).model_dump_json().encode())
