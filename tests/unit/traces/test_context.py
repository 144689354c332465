"""Ids of traces: the `traceparent` as it is read and written, and ids that are derived."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.traces.context import TraceContext, parse, span_id_of, trace_id_of

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_traceparent_is_read_and_written() -> None:
    found = parse(EXAMPLE)

    assert found == TraceContext(trace_id=0x4BF92F3577B34DA6A3CE929D0E0E4736, span_id=0x00F067AA0BA902B7, sampled=True)
    assert found.header() == EXAMPLE
    assert found.with_span(1).header() == "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000001-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [(EXAMPLE[:-2] + "00", False), (EXAMPLE[:-2] + "03", True), ("cc" + EXAMPLE[2:] + "-what-comes", True)],
)
def test_flags_and_later_versions_are_understood(text: str, sampled: bool) -> None:
    found = parse(text)

    assert found is not None and found.sampled is sampled


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        EXAMPLE + "-more",
        EXAMPLE + "\n",
        EXAMPLE.upper(),
        "ff" + EXAMPLE[2:],
        EXAMPLE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        EXAMPLE.replace("00f067aa0ba902b7", "0" * 16),
        EXAMPLE[:-1],
        "cc" + EXAMPLE[2:] + "-" + "x" * 201,
    ],
)
def test_what_is_no_traceparent_is_ignored(text: object) -> None:
    assert parse(text) is None


@given(st.text(max_size=80))
def test_any_text_is_read_or_ignored(text: str) -> None:
    found = parse(text)

    assert found is None or parse(found.header()) == found


@given(st.text(max_size=40))
def test_derived_ids_are_stable_and_none_is_zero(record_id: str) -> None:
    assert 0 < trace_id_of(record_id) == trace_id_of(record_id) < 1 << 128
    assert 0 < span_id_of(record_id, "attempt", 1) < 1 << 64


def test_ids_of_attempts_and_parts_differ() -> None:
    ids = [span_id_of("t", what, part) for what in ("task", "queue", "attempt", "run") for part in ("", 1, 2, 11)]

    assert len(set(ids)) == len(ids)
    assert span_id_of("t", "attempt", 1) != span_id_of("t1", "attempt", "")


def test_a_ratio_of_derived_traces_can_be_sampled() -> None:
    """Samplers take the low 64 bits for a number that is drawn evenly; those of a UUID are not."""
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, str(number))) for number in range(2000)]

    low = sum(trace_id_of(one) % (1 << 64) < (1 << 64) // 10 for one in ids)

    assert 120 < low < 280, "a tenth of 2000"
