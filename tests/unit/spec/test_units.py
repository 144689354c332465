"""Durations, memory and CPUs as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.spec import duration_seconds, memory_mib
from gpuflow.spec.units import as_number, cpu_count


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90), (0.5, 0.5), ("90", 90), ("90s", 90), ("2h", 7200), ("1h30m", 5400), ("1h 30m", 5400), ("500ms", 0.5),
        ("1.5h", 5400), ("1d", 86400), ("1W", 604800), (" 2 m ", 120), ("1e2", 100),
    ],
)  # fmt: skip
def test_durations(value, seconds):
    assert duration_seconds(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "h", "2x", "-1", -1, "1h-2m", None, True, [], float("nan"), float("inf"), "1:30", "1e999"]
)
def test_no_durations(value):
    with pytest.raises(ValueError, match="such as 90s, 2h or 1h30m"):
        duration_seconds(value)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_duration_is_the_sum_of_its_parts(hours, minutes, seconds):
    assert duration_seconds(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("value", "mib"),
    [
        ("32Gi", 32768),
        ("32GiB", 32768),
        ("16 gb", 15259),
        ("40G", 38147),
        ("512Mi", 512),
        ("1.5Ti", 1572864),
        ("1Ki", 1),
    ],
)
def test_memory(value, mib):
    assert memory_mib(value) == mib


@pytest.mark.parametrize("value", ["", "32", 32, "Gi", "-1Gi", "32Q", None, True, "1e3Gi", "9" * 50 + "Gi"])
def test_no_memory(value):
    with pytest.raises(ValueError, match="such as 32Gi or 40GB"):
        memory_mib(value)


@given(st.integers(1, 10**6))
def test_memory_in_gib_is_exact(gib):
    assert memory_mib(f"{gib}Gi") == gib * 1024


@pytest.mark.parametrize(("value", "cpus"), [(8, 8), ("8", 8), (0.5, 0.5), ("500m", 0.5)])
def test_cpus(value, cpus):
    assert cpu_count(value) == cpus


@pytest.mark.parametrize("value", ["", "many", 0, -1, True, None, "8G", "m"])
def test_no_cpus(value):
    with pytest.raises(ValueError, match="such as 8"):
        cpu_count(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_written_as_text_is_that_number(number):
    assert as_number(repr(number)) == number
