"""Whether this process may use the network, and what to say when it would have to.

The worker sets GPUFLOW_OFFLINE for a child by its setting `offline`, with the switches of the libraries beside it.
"""

from __future__ import annotations

import os
from typing import Final

_TRUE: Final = frozenset({"1", "true", "yes", "on", "y", "t"})
_SWITCHES: Final = ("GPUFLOW_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline() -> bool:
    """Say whether nothing may be fetched from the network."""
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in _SWITCHES)


def not_here(what: str) -> str:
    """Return the message for something that is not on this machine and may not be fetched."""
    return (
        f"{what} is not in the cache of this machine, and nothing may be fetched: it is offline (GPUFLOW_OFFLINE, "
        "HF_HUB_OFFLINE); fetch it with `gpuflow models pull` on a machine with a network and bring it here with "
        "`gpuflow models export` and `import`, or switch offline off"
    )
