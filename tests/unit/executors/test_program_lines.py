"""What the lines of a program say: progress bars, counts, metrics, and the ends of lines."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from executors.programs.lines import Progress, metrics_in, progress_in, split_lines
from gpuflow.protocol import MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("text", "current", "total", "unit"),
    [
        (" 42%|####      | 420/1000 [00:42<00:58, 10.00it/s]", 420, 1000, "it"),
        ("train: 100%|##########| 3/3 [00:00<00:00, 5.10it/s, loss=0.5]", 3, 3, "it"),
        ("  0%|          | 0/60 [00:00<?, ?it/s]", 0, 60, "it"),
        ("model.bin:  50%|#####     | 1.2k/2.4k [00:01<00:01]", 1200, 2400, "it"),
        ("x:  10%|█         | 10.5M/105MB [00:01<00:09]", 10_500_000, 105_000_000, "it"),
        ("epoch 3/10", 3, 10, "epoch"),
        ("Step: 30 of 60, loss=1.5", 30, 60, "step"),
        ("[step 7/9] saved", 7, 9, "step"),
        ("Iteration 2/4", 2, 4, "iteration"),
    ],
)
def test_progress_is_found(text: str, current: float, total: float, unit: str) -> None:
    assert progress_in(text) == Progress(current=current, total=total, unit=unit, is_bar="%|" in text)


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "2026/11/24 18:00", "step 5", "epoch 9/3", "step 1/0", "http://x/step/1", "50%", "stepped 1/2",
        "  5%|  | 9/3 [", "ratio 1/2", f"step 1/2{' ' * 20_000}",
    ],
)  # fmt: skip
def test_what_is_no_progress(text: str) -> None:
    assert progress_in(text) is None


def test_metrics_are_the_first_groups_that_are_numbers() -> None:
    patterns = {name: re.compile(text) for name, text in {"loss": r"loss=(\S+)", "eval": r"eval_(loss|x)"}.items()}

    assert metrics_in("loss=1.5 then loss=0.25", patterns) == {"loss": 0.25}
    assert metrics_in("loss=nan loss=inf eval_loss", patterns) == {}
    assert metrics_in("nothing", patterns) == {}


def test_lines_end_at_newlines_and_at_carriage_returns() -> None:
    chunks = iter([b"a\nb", b"c\r\r\nd", b"\n\n", b"last"])

    assert list(split_lines(chunks)) == [b"a", b"bc", b"d", b"last"]


def test_an_endless_line_is_cut() -> None:
    block = b"x" * (1 << 20)
    lines = list(split_lines(iter([block] * 20)))

    assert sum(map(len, lines)) == 20 << 20
    assert max(map(len, lines)) <= MAX_LINE_BYTES + len(block)


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_however_it_comes_the_text_is_the_same(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)

    assert list(split_lines(iter(chunks))) == [line for line in re.split(rb"[\r\n]+", whole) if line]
