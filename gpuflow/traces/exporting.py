"""Sends spans to the operator's collector by OpenTelemetry's SDK; imported only where GPUFLOW_TRACES asks for it.

The collector, its headers and certificates, sampling and the sizes of the queue are the standard OTEL_* variables of
this process, which the SDK reads. Spans wait in a bounded queue, and a thread sends them: a collector that is down or
slow costs spans, never a task.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gpuflow import __version__
from gpuflow.logs import get_logger
from gpuflow.traces.context import TraceContext
from gpuflow.traces.spans import SpanData

log = get_logger("gpuflow.traces")

#: For so long a process that ends waits for its last spans to be taken, in seconds.
CLOSE_SECONDS: Final = 2.0
_KINDS: Final = {"internal": SpanKind.INTERNAL, "producer": SpanKind.PRODUCER, "consumer": SpanKind.CONSUMER}
#: Loggers of the SDK that say the same of each batch; what they say in our threads is said once, by us.
_NOISY: Final = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


class SpanExport:
    """Sends the ended spans of this process."""

    def __init__(self) -> None:
        self._ids = _GivenIds()
        for name in _NOISY:
            logging.getLogger(name).addFilter(_muted)
        self._provider = TracerProvider(id_generator=self._ids, resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_OnceLogged(OTLPSpanExporter())))
        self._tracer = self._provider.get_tracer("gpuflow", __version__)
        atexit.register(self.close)

    def send(self, span: SpanData) -> None:
        """Put a span into the queue; whatever goes wrong is no concern of the task that it is about."""
        try:
            with _muted.here():
                self._send(span)
        except Exception as error:  # noqa: BLE001  (no span is worth a task)
            log.warning("span_not_made", span=span.name, cause=str(error))

    def _send(self, span: SpanData) -> None:
        with self._ids.given(span.context):
            made = self._tracer.start_span(
                span.name,
                context=_parent(span.parent),
                kind=_KINDS[span.kind],
                attributes=dict(span.attributes),
                links=[trace.Link(_span_context(one)) for one in span.links],
                start_time=_nanoseconds(span.start),
            )
        for name, at in span.events:
            made.add_event(name, timestamp=_nanoseconds(at))
        if span.error:
            made.set_attribute("error.type", span.error)
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(_nanoseconds(max(span.start, span.end)))

    def sampled(self, trace_id: int) -> bool:
        """Whether a trace that begins here is recorded (OTEL_TRACES_SAMPLER): the same answer in every process."""
        decision = self._provider.sampler.should_sample(None, trace_id, "gpuflow").decision
        return decision is Decision.RECORD_AND_SAMPLE

    @staticmethod
    def current() -> TraceContext | None:
        """Return the span in which the caller is now, by OpenTelemetry's API; None outside of any."""
        found = trace.get_current_span().get_span_context()
        if not found.is_valid:
            return None
        return TraceContext(trace_id=found.trace_id, span_id=found.span_id, sampled=found.trace_flags.sampled)

    @staticmethod
    def new_span_id() -> int:
        """Return the id of a span that nobody else has to name."""
        return secrets.randbits(64) or 1

    def flush(self) -> None:
        """Send what waits, now. For tests, and before a process that has little time is ended."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what waits, for CLOSE_SECONDS at most: a collector that hangs holds up no exit."""
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # it is too late for a thread
            closing = threading.Thread(target=self._provider.shutdown, name="gpuflow-traces-close", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)


def why_no_answer(seconds: float) -> str:
    """Send the collector a request without spans; return why it has not taken it within this time, "" where it has.

    Raises what the SDK does of an OTEL_* variable that it cannot read.
    """
    exporter: SpanExporter = OTLPSpanExporter(timeout=seconds)
    heard, taken = _Heard(), list[SpanExportResult]()
    asking = threading.Thread(target=lambda: taken.append(exporter.export([])), name="gpuflow-traces-ask", daemon=True)
    for name in _NOISY:
        logging.getLogger(name).addFilter(heard)
    try:
        asking.start()
        asking.join(seconds)
        exporter.shutdown()
    finally:
        for name in _NOISY:
            logging.getLogger(name).removeFilter(heard)
    if taken == [SpanExportResult.SUCCESS]:
        return ""
    return heard.last or f"no answer within {seconds:g} s"


class _Heard(logging.Filter):
    """Keeps the last line that the SDK logs, and leaves it out of the log."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line."""
        self.last = record.getMessage()
        return False


class _GivenIds(IdGenerator):
    """Gives the span that this thread begins the ids that it is to have."""

    def __init__(self) -> None:
        self._here = threading.local()

    @contextlib.contextmanager
    def given(self, context: TraceContext) -> Iterator[None]:
        self._here.context = context
        try:
            yield
        finally:
            del self._here.context

    def generate_trace_id(self) -> int:
        """Return the id of the trace."""
        return int(self._here.context.trace_id)

    def generate_span_id(self) -> int:
        """Return the id of the span."""
        return int(self._here.context.span_id)


class _Muted(logging.Filter):
    """Leaves out what the SDK logs in a thread that is at work for us; other users of the SDK keep their lines."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        self._here.muted = True
        try:
            yield
        finally:
            self._here.muted = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        return not getattr(self._here, "muted", False)


_muted: Final = _Muted()


class _OnceLogged(SpanExporter):
    """Exports by another exporter; says once that the collector takes nothing, and once that it does again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, in the thread of the queue."""
        try:
            with _muted.here():
                result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001  (as a batch that was refused)
            self._note(failing=True, cause=type(error).__name__)
            return SpanExportResult.FAILURE
        self._note(failing=result is not SpanExportResult.SUCCESS, cause="it cannot be reached, or refuses them")
        return result

    def _note(self, *, failing: bool, cause: str) -> None:
        if failing and not self._failing:
            log.warning("traces_not_exported", cause=cause, mend="check OTEL_EXPORTER_OTLP_ENDPOINT and the collector")
        elif self._failing and not failing:
            log.info("traces_exported_again")
        self._failing = failing

    def shutdown(self) -> None:
        """End the exporter."""
        with _muted.here():
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return self._inner.force_flush(timeout_millis)


def _resource() -> Resource:
    """Return what this process is: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, or `gpuflow`."""
    own: dict[str, str | int] = {SERVICE_VERSION: __version__, "process.pid": os.getpid()}
    if SERVICE_NAME not in OTELResourceDetector().detect().attributes:
        own[SERVICE_NAME] = "gpuflow"
    return Resource.create({**own})


def _span_context(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


def _parent(context: TraceContext | None) -> Context:
    """Return the context of a parent; an empty one begins a trace, wherever the caller is."""
    return (
        Context() if context is None else trace.set_span_in_context(NonRecordingSpan(_span_context(context)), Context())
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
