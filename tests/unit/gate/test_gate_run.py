"""In which order the gate tests environments, what runs beside what, and what came of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gate.run import environments, groups


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


def test_a_run_of_some_environments_says_nothing_of_the_others(tmp_path: Path) -> None:
    ran = {"test": [{"command": ["ruff"], "retcode": 0}]}
    for number, name in enumerate(("lint", "vllm")):
        told = {"testenvs": {"lint": {}, "vllm": {}, name: ran}}  # as tox has it
        (tmp_path / f"{number}.json").write_text(json.dumps(told))

    assert environments(tmp_path) == {"lint": ran, "vllm": ran}
