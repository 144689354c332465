"""Executors of users in a real child: by path, by entry point, and what is said of one that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.executor_child import ROOT, Child, Ended, child_environment

EXAMPLE = ROOT / "examples" / "executor"
SPEC = {"data": {"type": "list", "items": ["a b a"]}, "parameters": {"top": 1}}

GOOD = """
from executors.base import Executor
from neighbour import ANSWER

class Good(Executor):
    task_types = ("acme.good",)

    def run(self, request, emitter):
        print("a print goes to the log")
        return {"answer": ANSWER, "parameters": request.spec.get("parameters")}

class NoExecutor:
    task_types = ("acme.good",)

class Other(Good):
    task_types = ("acme.other",)
"""


@pytest.fixture
def run(start: Callable[..., Child], tmp_path: Path) -> Callable[..., Ended]:
    """Run a task of acme.good, whose file stands in a folder of its own."""
    home = tmp_path / "mine"
    home.mkdir()
    (home / "good.py").write_text(GOOD)
    (home / "neighbour.py").write_text("ANSWER = 42\n")
    (home / "broken.py").write_text("import nothing_of_this_name\n")
    (home / "raising.py").write_text("raise ValueError('at import')\n")
    (home / "leaving.py").write_text("import sys\nsys.exit('no license')\n")

    def run_to_end(place: str, task_type: str = "acme.good") -> Ended:
        entry = f"{task_type}={place.replace('HOME', str(home))}"
        return start(task_type, {"parameters": {"a": 1}}, {"GPUFLOW_EXECUTORS": entry}).end()

    return run_to_end


def test_a_file_is_imported_with_its_neighbours(run: Callable[..., Ended]) -> None:
    ended = run("HOME/good.py:Good")

    assert ended.result == {"answer": 42, "parameters": {"a": 1}}
    assert "a print goes to the log" in ended.log


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        ("HOME/none.py:Good", "MissingDependency", "there is no file"),
        ("nothing_of_this_name.mod:Good", "MissingDependency", "cannot be imported"),
        ("HOME/broken.py:Good", "MissingDependency", "nothing_of_this_name"),
        ("HOME/raising.py:Good", "BadExecutor", "ValueError: at import"),
        ("HOME/leaving.py:Good", "BadExecutor", "SystemExit: no license"),
        ("HOME/good.py:Nobody", "BadExecutor", "no attribute 'Nobody'"),
        ("HOME/good.py:NoExecutor", "BadExecutor", "derives from executors.base.Executor"),
        ("HOME/good.py:Other", "BadExecutor", "does not name acme.good in its task_types"),
    ],
)
def test_what_is_no_executor_is_said_with_its_place(
    run: Callable[..., Ended], place: str, kind: str, message: str
) -> None:
    ended = run(place)

    assert ended.error["type"] == kind
    assert message in ended.error["message"]
    assert not ended.error["retryable"]
    assert ended.code == 2


def test_one_that_ends_the_process_at_its_import_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    entries = f"acme.leaving={tmp_path}/leaving.py:Any,acme.wordcount={EXAMPLE}/acme_wordcount/executor.py:WordCount"

    done = subprocess.run(
        [sys.executable, "-P", "-m", "executors.registry", "acme.leaving", "acme.wordcount"],
        env=child_environment({"GPUFLOW_EXECUTORS": entries}),
        capture_output=True,
        check=True,
    )

    problems = {one["task_type"]: one["problem"] for one in json.loads(done.stdout)["value"]["executors"]}
    assert "SystemExit" in problems["acme.leaving"]
    assert problems["acme.wordcount"] == ""


def test_nobody_registered_it(start: Callable[..., Child]) -> None:
    error = start("acme.unknown", {}).end().error

    assert error["type"] == "UnknownTaskType"
    assert "install its package beside the worker" in error["message"]


def test_the_example_project_registers_its_executor_by_entry_point(start: Callable[..., Child], tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "acme_wordcount-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["gpuflow.executors"]
    (info / "entry_points.txt").write_text(
        "[gpuflow.executors]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
    )
    path = os.pathsep.join([str(EXAMPLE), str(tmp_path / "site"), child_environment()["PYTHONPATH"]])

    ended = start("acme.wordcount", SPEC, {"PYTHONPATH": path}).end()

    assert ended.result["items"][0]["output"] == {"a": 2}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "executors.registry"],
        env=child_environment({"PYTHONPATH": path}),
        capture_output=True,
        check=True,
    )
    listed = {one["task_type"]: one for one in json.loads(done.stdout)["value"]["executors"]}
    assert listed["acme.wordcount"]["source"] == "acme-wordcount"
    assert listed["acme.wordcount"]["about"].startswith("Counts the words")
    assert {"echo", "inference", "sft", "lora_sft"} <= set(listed)


def test_the_tests_of_the_example_project_pass() -> None:
    path = os.pathsep.join([str(EXAMPLE), child_environment()["PYTHONPATH"]])

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=EXAMPLE,
        env=child_environment({"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
