"""How the policy of a task comes to its child: in the request, and from there to whatever opens or connects there.

What is judged in the child holds against templates. It holds nothing against a task that runs code of its own, in the
same process: that is what GPUFLOW_ALLOW_CODE and the isolation of children are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.policy.hosts import Hosts, Place
from gpuflow.policy.roots import Roots


def child_policy(roots: Roots, hosts: Hosts) -> dict[str, Any]:
    """Return what a request carries, as JSON can hold it."""
    return {
        "read": list(roots.read),
        "write": list(roots.write),
        "own": list(roots.own),
        "hosts": list(hosts.allowed),
        "own_hosts": [[place.host, place.port] for place in hosts.own],
        "brokers": [[place.host, place.port] for place in hosts.brokers],
    }


def read_policy(given: Mapping[str, Any]) -> tuple[Roots, Hosts]:
    """Return what `child_policy` was made of. Raises KeyError, TypeError, ValueError for anything else."""
    roots = Roots(read=tuple(given["read"]), write=tuple(given["write"]), own=tuple(given["own"]))
    own, brokers = (
        tuple(Place(host=str(host), port=int(port)) for host, port in given[name]) for name in ("own_hosts", "brokers")
    )
    return roots, Hosts(allowed=tuple(given["hosts"]), own=own, brokers=brokers)
