"""Makes this worker a newer version: it writes and reads the next schema. Loaded by `--include newer_version`."""

from __future__ import annotations

from gpuflow import submission
from gpuflow.ledger import ledger, records
from gpuflow.worker import supervisor

SCHEMA = records.RECORD_SCHEMA + 1
MODULES = (ledger, records, submission, supervisor)

for module in MODULES:
    module.RECORD_SCHEMA = SCHEMA  # type: ignore[attr-defined]
records.COMMON_SCHEMA = SCHEMA  # type: ignore[misc]
