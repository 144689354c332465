"""The lease table of this process. A worker installs one at its start; the transport and the ledger ask for it."""

from __future__ import annotations

from gpuflow.broker.lease_table import LeaseTable


class _Process:
    table: LeaseTable | None = None


def install(table: LeaseTable) -> None:
    """Make `table` the one that every channel of this process uses (a worker does this once at its start)."""
    _Process.table = table


def installed() -> LeaseTable | None:
    """Return the lease table of this process, if it is a worker."""
    return _Process.table
