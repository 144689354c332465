"""Ranges and digests: what a header means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.artifacts.repr_digest import parse_repr_digest, repr_digest
from gpuflow.gateway.downloads import Span, asked_span
from gpuflow.gateway.problems import Problem


@given(size=st.integers(0, 50), first=st.integers(0, 60) | st.none(), last=st.integers(0, 60) | st.none())
def test_a_range_names_the_bytes_that_the_rfc_says(size: int, first: int | None, last: int | None) -> None:
    content = bytes(range(size))
    text = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is None:
        wanted = content[max(0, size - last) :] if last else b""
    else:
        wanted = content[first : size if last is None else last + 1]

    asks_for_bytes = first is not None or last is not None
    backwards = first is not None and last is not None and last < first
    if asks_for_bytes and not backwards and not wanted:
        with pytest.raises(Problem) as caught:
            asked_span({"range": text}, size, '"x"')
        assert caught.value.status == 416
        return
    span = asked_span({"range": text}, size, '"x"')

    if span is None:
        assert backwards or not asks_for_bytes
    else:
        assert content[span.start : span.start + span.length] == wanted != b""


@given(st.text(max_size=30))
def test_any_other_text_is_no_range(text: str) -> None:
    assert asked_span({"range": f"x{text}"}, 10, '"x"') is None


def test_a_condition_that_does_not_hold_asks_for_all() -> None:
    assert asked_span({"range": "bytes=1-2", "if-range": '"x"'}, 10, '"x"') == Span(start=1, length=2)
    assert asked_span({"range": "bytes=1-2", "if-range": '"y"'}, 10, '"x"') is None
    assert asked_span({"range": "bytes=1-2", "if-range": 'W/"x"'}, 10, '"x"') is None


@given(st.binary(min_size=32, max_size=32))
def test_a_digest_comes_back_from_its_header(digest: bytes) -> None:
    header = repr_digest(digest.hex())
    assert parse_repr_digest(header) == digest.hex()
    assert parse_repr_digest(f"sha-512=:AAAA:, {header}, md5=:AAAA:") == digest.hex()


@pytest.mark.parametrize("value", [None, "", "sha-256", "sha-256=::", "sha-256=:A:", "sha-256=:AAAA:", "SHA-256=x"])
def test_what_is_no_digest_is_none(value: str | None) -> None:
    assert parse_repr_digest(value) is None
