"""Makes this worker one of the version before functions in stages (`--include older_version`)."""

from __future__ import annotations

from gpuflow.fleet import versions
from gpuflow.ledger import ledger, records
from gpuflow.worker import supervisor

for module in (ledger, records, supervisor, versions):
    module.RECORD_SCHEMA = 2  # type: ignore[attr-defined]
