"""User data that Celery's JSON would change, refuse, or cannot write, comes out as it went in."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from kombu.utils.json import dumps, loads

from gpuflow.broker.wire import needs_care, portable, wrapped
from gpuflow.protocol import whole_text

_TEXT = st.sampled_from(["__type__", "__value__", "uuid", "bytes", "gpuflow.mapping", "x"]) | st.text(max_size=5)
_DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_TEXT, inner, max_size=3)
        | st.builds(lambda kind, value: {"__type__": kind, "__value__": value}, inner, inner)
    ),
    max_leaves=12,
)


@given(_DATA)
def test_it_comes_out_as_it_went_in(data: Any) -> None:
    assert loads(dumps(portable(data))) == data
    assert loads(dumps(wrapped(data))) == data


@given(st.text(alphabet=st.characters()))
def test_every_text_can_be_written(text: str) -> None:
    whole = whole_text(text)

    whole.encode()
    assert whole_text(whole) == whole
    assert len(whole) == len(text) or any("\ud800" <= char <= "\udfff" for char in text)


def test_halves_are_marked_and_pairs_are_joined() -> None:
    assert whole_text("a\ud83db") == "a\ufffdb"
    assert whole_text("\ude00") == "\ufffd"
    assert whole_text("\ud83d\ude00") == "\N{GRINNING FACE}"
    assert portable({"\ud83d": ["\ud83d"]}) == {"\ufffd": ["\ufffd"]}


def test_ordinary_data_is_not_copied() -> None:
    data = {"type": "x", "value": [1, {"__type__x": 2}]}
    assert portable(data) is data
    assert not needs_care(dumps(data))
