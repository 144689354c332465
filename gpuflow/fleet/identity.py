"""The identity of a fleet: a random id, made once in its broker, by which its machines are told from those of others.

Two fleets that share a state folder, an account of a provider or a key prefix have different ids. A broker that was
flushed gets a new one: machines of the old id are never ended by the new fleet.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from gpuflow.broker.keys import Keys
from gpuflow.errors import GPUFlowError

_ID: Final = re.compile(r"[0-9a-f]{16}")


def fleet_id(client: Any, keys: Keys) -> str:
    """Return the id of the fleet of a broker and prefix, made at the first call; `client` decodes.

    Raises redis errors, and GPUFlowError for a value that is no id.
    """
    found = client.get(keys.fleet_id)
    if found is None:
        client.set(keys.fleet_id, secrets.token_hex(8), nx=True)
        found = client.get(keys.fleet_id)
    if not _ID.fullmatch(str(found)):
        raise GPUFlowError(f"the key {keys.fleet_id} holds no fleet id; delete it (a new one is made), or restore it")
    return str(found)


def fleet_tag(fleet: str, keys: Keys) -> str:
    """Return the tag of the machines of a fleet: the prefix of its keys, readable, and its id."""
    prefix = keys.prefix.strip(":").replace(":", ".") or "gpuflow"
    return f"{prefix}-{fleet}"
