"""In which order the gate tests environments, and what runs beside what."""

from __future__ import annotations

import pytest

from tests.gate.run import groups


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lint", "tests", "browser", "tls", "vllm"], [(["lint", "tests"], []), (["vllm"], ["browser", "tls"])]),
        (["vllm", "tls"], [(["vllm"], ["tls"])]),
        (["lint", "browser", "tls"], [(["lint", "browser", "tls"], [])]),
        (["vllm"], [(["vllm"], [])]),
        ([], []),
    ],
)
def test_what_waits_most_of_its_time_runs_beside_another(
    names: list[str], expected: list[tuple[list[str], list[str]]]
) -> None:
    assert groups(names) == expected
    assert sorted(one for pair in groups(names) for part in pair for one in part) == sorted(names)
