"""Ids of traces and spans: the W3C `traceparent`, and ids derived from those of tasks. Pure; needs no OpenTelemetry.

A derived id is the same in every process, so that a worker can name the span of an attempt that another one has begun.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

#: Header of a message, field of a record and option of `send_task` with the context that a task or pipeline continues.
TRACEPARENT: Final = "traceparent"
#: Variable of a child with the context of its attempt.
VARIABLE: Final = "TRACEPARENT"
#: https://www.w3.org/TR/trace-context/#traceparent-header-field-values; later versions may go on after the flags.
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]{1,200})?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, kw_only=True)
class TraceContext:
    """One span of one trace, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    sampled: bool = True

    def header(self) -> str:
        """Return it as a `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    def with_span(self, span_id: int) -> TraceContext:
        """Return another span of the same trace."""
        return TraceContext(trace_id=self.trace_id, span_id=span_id, sampled=self.sampled)


def parse(text: object) -> TraceContext | None:
    """Read a `traceparent`, which comes from outside; None for what is none."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    context = TraceContext(trace_id=int(trace, 16), span_id=int(span, 16), sampled=bool(int(flags, 16) & _SAMPLED))
    if version == "ff" or (version == "00" and more) or not context.trace_id or not context.span_id:
        return None
    return context


_continued: ContextVar[str] = ContextVar("gpuflow_traceparent", default="")


@contextlib.contextmanager
def continuing(traceparent: str) -> Iterator[None]:
    """Let submits within the block continue this trace, that of a request from elsewhere, say."""
    token = _continued.set(traceparent)
    try:
        yield
    finally:
        _continued.reset(token)


def continued_here() -> TraceContext | None:
    """Return the context that submits continue here; None for none."""
    return parse(_continued.get())


def trace_id_of(record_id: str) -> int:
    """Return the id of the trace of a task or pipeline that continues no other trace.

    A digest, not the UUID itself: samplers take the low 64 bits for a random number, and those of a UUID begin with
    its variant.
    """
    return _digest(16, "trace", record_id)


def span_id_of(record_id: str, what: str, part: object = "") -> int:
    """Return the id of one span of a task or pipeline: of attempt `part`, say."""
    return _digest(8, "span", record_id, what, str(part))


def _digest(size: int, *parts: str) -> int:
    text = "\0".join(("gpuflow", *parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:size]) or 1  # 0 is no id
