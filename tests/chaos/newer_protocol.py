"""Makes this worker a version that older ones cannot work beside. Loaded by `--include newer_protocol`."""

from __future__ import annotations

from gpuflow.fleet import versions

versions.FLEET_PROTOCOL = versions.OLDEST_BESIDE = 2  # type: ignore[misc]
