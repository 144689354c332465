"""Two versions of gpuflow on one broker: which may work side by side, and what becomes of one that may not.

Every worker shares keys, messages and atomic steps with the others. FLEET_PROTOCOL numbers what those mean. A change
that an older worker could not live beside raises it, and OLDEST_BESIDE with it; one that only adds raises neither, and
a newer kind of record or message is marked by RECORD_SCHEMA, so that older workers leave it to newer ones.

A worker that starts writes its OLDEST_BESIDE into `gpuflow.protocol`, where it only grows. So an older one that starts
later is refused, one that runs drains at its next heartbeat, and a newer one does not start while workers live that it
cannot work beside.
"""

from __future__ import annotations

from typing import Any, Final

from gpuflow import __version__
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.ledger.records import RECORD_SCHEMA

#: What keys, messages and atomic steps of this version mean.
FLEET_PROTOCOL: Final = 1
#: The oldest protocol that workers of this version can work beside.
OLDEST_BESIDE: Final = 1
#: The member of `gpuflow.protocol`.
_OLDEST: Final = "oldest"
#: Workers that are named in an error.
_MOST_NAMED: Final = 5


class IncompatibleVersion(GPUFlowError):
    """This version of gpuflow cannot work in this fleet; the message says which side to upgrade."""


def told() -> dict[str, int]:
    """Return what a worker says of its version in the registry."""
    return {"fleet": FLEET_PROTOCOL, "oldest": OLDEST_BESIDE, "record": RECORD_SCHEMA}


def protocol_of(entry: WorkerEntry) -> int:
    """Return the protocol of a worker; one that says none has the first."""
    said = entry.load.get("protocol")
    number = said.get("fleet") if isinstance(said, dict) else None
    return number if isinstance(number, int) else 1


def too_old(fleet: Fleet) -> str:
    """Return why this version is too old for the fleet, or "". Raises redis errors."""
    client: Any = fleet.client
    oldest = client.zscore(fleet.keys.protocol, _OLDEST)
    if oldest is None or oldest <= FLEET_PROTOCOL:
        return ""
    return (
        f"gpuflow {__version__} has fleet protocol {FLEET_PROTOCOL}, and this fleet works with {oldest:.0f} or newer; "
        "upgrade gpuflow on this machine"
    )


def join(fleet: Fleet, worker_id: str) -> None:
    """Make sure that this version can work beside the workers that are there, and have older ones kept out from now on.

    Raises IncompatibleVersion, redis errors.
    """
    if why := too_old(fleet):
        raise IncompatibleVersion(why)
    entries, _ = fleet.readable()
    older = [one for one in entries if one.is_there and one.id != worker_id and protocol_of(one) < OLDEST_BESIDE]
    if older:
        named = ", ".join(f"{one.id} (gpuflow {one.version or 'unknown'})" for one in older[:_MOST_NAMED])
        more = f" and {len(older) - _MOST_NAMED} more" if len(older) > _MOST_NAMED else ""
        raise IncompatibleVersion(
            f"gpuflow {__version__} works beside fleet protocol {OLDEST_BESIDE} and newer, and {named}{more} "
            f"{'has an older one' if len(older) == 1 else 'have older ones'}; "
            f"drain and upgrade first: gpuflow workers drain {older[0].id}"
        )
    client: Any = fleet.client
    client.zadd(fleet.keys.protocol, {_OLDEST: OLDEST_BESIDE}, gt=True)
