"""What `gpuflow doctor` says of traces: off, not installed, and a collector that answers, refuses, hangs or is away."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gpuflow.cli import checks_traces
from gpuflow.cli.checks import Check
from gpuflow.settings import Settings
from tests.support.collector import Collector

TOKEN = "token-of-the-collector-5d1f"
ON = Settings(traces="otlp")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url.replace("://", "://ana:word-of-ana@"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-token={TOKEN}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield made
    finally:
        made.close()


def check(settings: Settings) -> Check:
    (found,) = checks_traces.trace_checks(settings)
    assert found.name == "traces" and found.status in ("ok", "warn"), "what is wrong with traces costs no task"
    assert TOKEN not in f"{found}" and "word-of-ana" not in f"{found}"
    return found


def test_without_the_setting_nothing_is_sent(collector: Collector) -> None:
    found = check(Settings())
    assert (found.status, found.detail) == ("ok", "off (GPUFLOW_TRACES)")
    assert collector.requests == 0


def test_a_collector_that_answers(collector: Collector) -> None:
    found = check(ON)
    assert found.status == "ok" and "127.0.0.1" in found.detail and found.detail.endswith("which answers")
    assert collector.requests == 1 and collector.spans() == []
    assert {name.lower(): value for name, value in collector.headers[0].items()}["x-token"] == TOKEN


@pytest.mark.parametrize(("mode", "cause"), [("refuse", "500"), ("hang", "")])
def test_a_collector_that_takes_nothing(
    collector: Collector, mode: str, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks_traces, "WAIT_SECONDS", 0.5)
    collector.mode = mode
    found = check(ON)
    assert found.status == "warn" and "spans are lost" in found.detail and cause in found.detail
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in found.mend
    assert not caplog.records, "what the SDK says is in the table"


def test_a_collector_that_is_not_there(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    monkeypatch.setattr(checks_traces, "WAIT_SECONDS", 0.5)
    found = check(ON)
    assert found.status == "warn" and "http://127.0.0.1:1/v1/traces takes none: " in found.detail
    assert collector.requests == 0


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuflow.traces.exporting", None)
    found = check(ON)
    assert found.status == "warn" and "gpuflow[traces]" in found.mend


def test_a_variable_that_the_sdk_cannot_read(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    found = check(ON)
    assert found.status == "warn" and found.mend == "check the OTEL_* variables"
    assert collector.requests == 0
