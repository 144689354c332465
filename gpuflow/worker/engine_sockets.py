"""Gives an engine a folder of its own for its sockets, which goes when its processes have ended, however they did.

vLLM's processes talk by sockets in the folder of temporary files, named by random UUIDs, and remove them at a clean end
alone: a child that is killed would leave them for ever. In a sandbox /tmp is the child's own and goes with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.worker.confinement import Confinement

#: Where vLLM puts its sockets.
VARIABLE: Final = "VLLM_RPC_BASE_PATH"
_ENGINE: Final = "GPUFLOW_ENGINE"
_PREFIX: Final = "gpuflow-sockets-"
#: The path of a socket has at most 107 bytes (unix(7)); its name here and that of its folder take 64.
_MOST_BYTES: Final = 107 - len(_PREFIX) - 8 - 2 - 38
_REMOVE: Final = shutil.which("rm") or "/bin/rm"


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a child is started with: its environment, and the command that is run when nothing of it is left."""

    environment: Mapping[str, str]
    at_end: Sequence[str]


@contextlib.contextmanager
def own_sockets(environment: Mapping[str, str], at_end: Sequence[str], confinement: Confinement) -> Iterator[Started]:
    """Give what a child is started with in the block: for vLLM outside of a sandbox with a folder for its sockets.

    The folder is removed by the command at its end, or here where the block fails and so no child was started. A child
    with another command has no folder: its engine runs in a container. Raises OSError.
    """
    if environment.get(_ENGINE) != "vllm" or at_end or confinement.sandbox:
        yield Started(environment=environment, at_end=at_end)
        return
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
    try:
        if confinement.user is not None:
            os.chown(folder, confinement.user.uid, confinement.user.gid)
        yield Started(environment={**environment, VARIABLE: str(folder)}, at_end=(_REMOVE, "-rf", "--", str(folder)))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _base() -> str:
    """Return the folder of the operator, or that of temporary files; /tmp where its name is too long for sockets."""
    base = os.environ.get(VARIABLE) or tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= _MOST_BYTES else "/tmp"  # noqa: S108
