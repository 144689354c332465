"""The lease table of this process. A worker installs it once at its start, and every channel of the process uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuflow.broker.leases import LeaseTable


class _Process:
    table: LeaseTable | None = None


def install(table: LeaseTable) -> None:
    """Make `table` the one that every channel of this process uses."""
    _Process.table = table


def installed() -> LeaseTable | None:
    """Return the lease table of this process, if it is a worker."""
    return _Process.table
