"""Shares of a GPU's memory: one locked file each, whose name says the GPU and the MiB that are promised.

Used by the GPU locks alone, which holds the mutex of the machine meanwhile. A share lives while somebody has its file
locked; the file of a dead holder counts nothing and is removed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.fleet.gpu_directory import LockDirectory

_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,99}(?:/[0-9]{1,4}){0,2}")
_SHARE: Final = re.compile(r"share-(.+)-[0-9a-f]{16}-([0-9]{1,9})\.lock")


def file_part(uuid: str) -> str:
    """Return the UUID as part of a file name (older drivers write `MIG-GPU-.../gi/ci`). Raises GPUFlowError."""
    if _UUID.fullmatch(uuid) is None:
        raise GPUFlowError(
            f"{uuid!r} is not the UUID of a GPU: letters, digits and '-' are allowed, and up to 100 of them"
        )
    return uuid.replace("/", "_")


def lock_name(uuid: str) -> str:
    """Return the name of a GPU's lock file. Raises GPUFlowError."""
    return f"gpu-{file_part(uuid)}.lock"


def make_share(directory: LockDirectory, uuid: str, mib: int) -> int:
    """Promise `mib` of a GPU; return the open file that holds the promise. Raises GPUFlowError."""
    return directory.lock_new(f"share-{file_part(uuid)}-{secrets.token_hex(8)}-{mib}.lock")


def live_shares(directory: LockDirectory, names: Sequence[str]) -> dict[str, int]:
    """Return the MiB promised of each GPU that has live shares, by file part; remove dead ones among `names`."""
    promised: dict[str, int] = {}
    for name in names:
        found = _SHARE.fullmatch(name)
        if found is None:
            continue
        if directory.is_held(name):
            promised[found[1]] = promised.get(found[1], 0) + int(found[2])
        else:
            directory.remove(name)
    return promised
