"""What a process loads, and what it says, with and without the setting and the extra."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
{before}
from gpuflow.celery_app import app
traces = app.traces
print(traces is not None, "gpuflow.traces.exporting" in sys.modules)
"""


def begin(before: str = "", **env: str) -> tuple[str, str]:
    """Begin the traces of an app in a process of its own; return its answer and what it logged.

    Asked is for our part: redis-py loads OpenTelemetry itself where that is installed.
    """
    variables = {**os.environ, "REDIS_URL": "redis://127.0.0.1:1", **env}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_without_the_setting_nothing_is_loaded() -> None:
    assert begin(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1") == ("False False", "")


def test_with_the_setting_the_sdk_is_loaded_and_connects_to_nothing() -> None:
    assert begin(GPUFLOW_TRACES="otlp", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1") == ("True True", "")


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_a_process_says_so_and_works(missing: str) -> None:
    answer, said = begin(f"sys.modules[{missing!r}] = None", GPUFLOW_TRACES="otlp")

    assert answer.startswith("False")
    assert said.count("traces_not_available") == 1 and "gpuflow[traces]" in said


def test_a_variable_that_the_sdk_cannot_read_stops_nothing() -> None:
    answer, said = begin(GPUFLOW_TRACES="otlp", OTEL_BSP_MAX_QUEUE_SIZE="-1")

    assert answer.startswith("False")
    assert said.count("traces_not_available") == 1 and "OTEL_*" in said
