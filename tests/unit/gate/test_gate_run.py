"""In which order the gate tests environments, what runs beside what, and what came of each."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.gate import run
from tests.gate.run import environments, groups
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["lint", "tests", "ml", "browser", "tls", "vllm"],
            [(["lint"], []), (["tests"], []), (["ml"], []), (["vllm"], ["browser", "tls"])],
        ),
        (["vllm", "tls"], [(["vllm"], ["tls"])]),
        (["newest", "lint", "browser", "tls"], [(["newest", "lint"], []), (["browser", "tls"], [])]),
        (["newest", "ml"], [(["newest"], []), (["ml"], [])]),
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


def test_a_group_is_built_while_the_one_before_it_is_tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began, lock = [], threading.Lock()

    def tox(*arguments: str, log: Path | None = None) -> int:
        step = f"{'build' if '--notest' in arguments else 'test'} {arguments[-1]}"
        with lock:
            began.append(step)
        if step == "test tests":
            eventually(lambda: "build tls" in began, what="the builds of the next group")
        return int(step == "build tls")

    monkeypatch.setattr(run, "_tox", tox)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "BUILDS", {})
    for name in ("lint", "tests", "browser", "tls", "vllm"):
        (tmp_path / f"build-{name}.log").write_text("it broke off: error")
    (tmp_path / "beside-2.log").touch()

    builds, code = run._build_and_test(groups(["lint", "tests", "browser", "tls", "vllm"]), began=0)

    assert code == 0
    assert {one.name: bool(one.error) for one in builds} == {
        "lint": False, "tests": False, "vllm": False, "browser": False, "tls": True,
    }  # fmt: skip
    assert began.count("build tls") == run.TRIES
    assert sorted(one for one in began if one.startswith("test")) == [
        "test browser",
        "test lint",
        "test tests",
        "test vllm",
    ]
