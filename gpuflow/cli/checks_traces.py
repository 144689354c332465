"""The check of `gpuflow doctor` of traces: on, installed, and a collector that answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from gpuflow.settings import Settings, mask_url
from gpuflow.terminal import one_line

if TYPE_CHECKING:
    from gpuflow.cli.checks import Check

#: For so long the collector may take to answer, in seconds.
WAIT_SECONDS: Final = 3.0
_NAME: Final = "traces"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: Where the SDK sends without those.
_DEFAULT: Final = "http://localhost:4318"


def trace_checks(settings: Settings) -> list[Check]:
    """Say whether a process with these settings sends spans; where it does, ask the collector for an answer.

    What is wrong here costs spans and no task, so it is a warning.
    """
    from gpuflow.cli.checks import Check

    if settings.traces == "none":
        return [Check(name=_NAME, status="ok", detail="off (GPUFLOW_TRACES)")]
    try:
        from gpuflow.traces.exporting import SpanExport, why_no_answer
    except ImportError as error:
        detail = f"GPUFLOW_TRACES=otlp, and OpenTelemetry is not installed: {error}"
        return [Check(name=_NAME, status="warn", detail=detail, mend='pip install "gpuflow[traces]"')]
    try:
        SpanExport().close()
        why = why_no_answer(WAIT_SECONDS)
    except Exception as error:  # noqa: BLE001  (whatever the SDK makes of an OTEL_* variable)
        detail = f"GPUFLOW_TRACES=otlp, and no spans can be sent: {one_line(str(error), 300)}"
        return [Check(name=_NAME, status="warn", detail=detail, mend="check the OTEL_* variables")]
    endpoint = mask_url(next((value for name in _ENDPOINTS if (value := os.environ.get(name))), _DEFAULT))
    if why:
        detail = f"spans are lost: the collector at {endpoint} takes none: {one_line(why, 300)}"
        return [
            Check(name=_NAME, status="warn", detail=detail, mend="check OTEL_EXPORTER_OTLP_ENDPOINT and the collector")
        ]
    return [Check(name=_NAME, status="ok", detail=f"sent to {endpoint}, which answers")]
