"""The check of `gpuflow doctor` of the environments of executors. It reads markers; it starts and loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuflow.environments import names, standings
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

if TYPE_CHECKING:
    from gpuflow.cli.checks import Check


def built_environments(settings: Settings) -> list[Check]:
    """Check every environment that is built on this machine; one that is not is no fault."""
    return list(_checks(settings))


def _checks(settings: Settings) -> Iterator[Check]:
    from gpuflow.cli.checks import Check

    for name in names(settings):
        try:
            found = standings(settings, name)
        except GPUFlowError as error:
            yield Check(name=f"env {name}", status="fail", detail=str(error), mend="mend that file")
            continue
        for one in found:
            label = f"env {name} ({one.variant})"
            if one.status == "ready" and one.marker is not None:
                yield Check(name=label, status="ok", detail=f"{one.folder}: {one.marker.size_bytes / 1e9:.1f} GB")
            elif one.status in ("broken", "outdated"):
                yield Check(name=label, status="fail", detail=one.detail, mend=f"run `{one.mend}`")
