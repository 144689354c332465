"""Rows of a training that hold nothing, and what the numbers of the result mean."""

from __future__ import annotations

import pytest

from executors.base import ExecutorError
from executors.training.rows import RowCounts, is_empty, without_empty


@pytest.mark.parametrize(
    ("row", "empty"),
    [
        ({"text": "Hello."}, False),
        ({"text": " \n"}, True),
        ({"prompt": "Where?", "completion": ""}, True),
        ({"prompt": "", "completion": "Here."}, False),
        (
            {"prompt": [{"role": "user", "content": "Where?"}], "completion": [{"role": "assistant", "content": " "}]},
            True,
        ),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}, True),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}]}, False),
        ({"prompt": "Where?"}, False),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, False),
    ],
)
def test_a_row_is_empty_where_nothing_can_be_learned_from_it(row, empty):
    assert is_empty(row) is empty


def test_empty_rows_are_left_out_and_the_order_stays():
    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]

    assert without_empty(rows) == [{"text": "one"}, {"text": "two"}]
    assert without_empty([]) == []


def test_data_that_is_all_empty_is_refused_with_its_number():
    with pytest.raises(ExecutorError, match="all 2 rows are empty"):
        without_empty([{"text": ""}, {"prompt": "a", "completion": ""}])


def test_the_record_names_only_reasons_that_occur():
    counts = RowCounts(read=24, trained=16, evaluated=4, too_long=4)

    assert counts.record() == {
        "rows": 24,
        "rows_trained": 16,
        "rows_evaluated": 4,
        "rows_dropped": {"max_length": 4},
        "rows_truncated": 0,
    }
