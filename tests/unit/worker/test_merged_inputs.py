"""The callers of a merged request get their inputs, secrets and variables as single tasks do; a bad one fails alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.merging import MergedChild, children_of
from gpuflow.artifacts.archive import pack
from gpuflow.environments import snapshot
from gpuflow.settings import Settings
from gpuflow.worker.child_python import python_of
from gpuflow.worker.preparation import PreparedAttempt, prepare
from gpuflow.worker.results_folder import ResultsFolder

Run = Callable[..., PreparedAttempt]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("KEY_A", "KEY_B"):
        (secrets / name).write_text(f"value-of-{name}")
        (secrets / name).chmod(0o600)
        monkeypatch.delenv(name, raising=False)
    settings = Settings.load(
        env={
            "GPUFLOW_CACHE_DIR": str(tmp_path / "cache"),
            "GPUFLOW_SECRETS_DIR": str(secrets),
            "RESULTS_DIR": str(tmp_path / "results"),
            "GPUFLOW_ENV_DIR": str(tmp_path / "environments"),
            "GPUFLOW_READ_ROOTS": f"{tmp_path},/no/where",
        },
        cwd=tmp_path,
    )

    def made(*children: Any, **common: Any) -> PreparedAttempt:
        spec = {"taskType": "echo", **common, "merge_children": list(children)}
        return prepare(
            spec,
            python=python_of(spec, snapshot(settings, gpus=False)),
            task_id="task",
            attempt=1,
            gpus=(),
            folder=ResultsFolder(settings.results_dir, "task"),
            settings=settings,
            worker_id="w1",
        )

    return made


def make_archive(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "weights").write_text(name)
    pack(folder, tmp_path / f"{name}.tar.gz")


def served(prepared: PreparedAttempt) -> dict[str, MergedChild]:
    return {child.id: child for child in children_of(prepared.request)}


def weights(folder: str | None) -> str:
    return (Path(folder or "") / "weights").read_text("utf-8")


def test_each_has_its_own_checkpoint_adapters_and_data_here(run: Run, tmp_path: Path) -> None:
    for name in ("base", "mine", "lora"):
        make_archive(tmp_path, name)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    own = {
        "checkpoint": {"load": {"url": (tmp_path / "mine.tar.gz").as_uri()}},
        "model": {"source": {"identifier": "m"}, "adapters": [{"type": "lora", "url": str(tmp_path / "lora.tar.gz")}]},
        "data": {"type": "jsonl", "url": (tmp_path / "rows.jsonl").as_uri()},
    }

    children = served(
        run(
            {"id": "a", "spec": own},
            {"id": "b", "spec": {"data": {"items": ["b"]}}},
            checkpoint={"load": {"path": str(tmp_path / "base.tar.gz")}},
            data={"items": ["common"]},
        )
    )

    a, b = children["a"].request, children["b"].request
    assert (weights(a.checkpoint_path), weights(b.checkpoint_path)) == ("mine", "base")
    (adapter,) = a.spec["model"]["adapters"]
    assert weights(adapter["path"]) == "lora"
    assert Path(a.spec["data"]["path"]).read_text("utf-8") == '{"a": 1}\n'
    assert b.spec["data"] == {"items": ["b"]}


def test_secrets_and_variables_of_all_are_in_the_one_process_and_hidden(run: Run) -> None:
    prepared = run(
        {"id": "a", "spec": {"secrets": ["KEY_A"], "env": {"PLACE": "here"}}},
        {"id": "b", "spec": {"secrets": ["KEY_B"], "env": {"WHERE": "${env:PLACE}", "API_KEY": "written-there"}}},
        env={"COMMON": "1"},
    )

    given = prepared.environment
    assert (given["KEY_A"], given["KEY_B"], given["PLACE"]) == ("value-of-KEY_A", "value-of-KEY_B", "here")
    assert prepared.request.spec["env"] == {
        "COMMON": "1", "PLACE": "here", "WHERE": "${env:PLACE}", "API_KEY": "written-there",
    }  # fmt: skip
    assert prepared.redactor.text("value-of-KEY_A value-of-KEY_B written-there") == "*** *** ***"
    assert "value-of" not in prepared.request.to_json()


@pytest.mark.parametrize(
    ("bad", "type", "said", "retryable"),
    [
        ({"secrets": ["KEY_C"]}, "MissingSecret", "worker w1 has no secret KEY_C", False),
        ({"checkpoint": {"load": {"path": "/no/where"}}}, "ArtifactError", "/no/where is not on this machine", False),
        ({"data": {"type": "jsonl", "upload": "x"}}, "ArtifactError", "data.upload was not sent", False),
        ({"env": {"PLACE": "there"}}, "Contradiction", "env.PLACE has another value in a call", False),
    ],
)
def test_one_whose_part_cannot_be_had_fails_alone(
    run: Run, bad: dict[str, Any], type: str, said: str, retryable: bool
) -> None:
    prepared = run(
        {"id": "good", "spec": {"secrets": ["KEY_A"]}},
        {"id": "bad", "spec": {"secrets": ["KEY_B"], **bad}},
        env={"PLACE": "here"},
    )

    children = served(prepared)
    error = children["bad"].error
    assert error is not None
    assert (error.type, error.retryable) == (type, retryable)
    assert said in error.message
    assert children["good"].error is None
    assert (prepared.environment["KEY_A"], prepared.environment["PLACE"]) == ("value-of-KEY_A", "here")
    assert "KEY_B" not in prepared.environment


def test_entries_that_are_none_are_left_to_the_child(run: Run) -> None:
    children = served(run({"id": "a"}, {"id": "b", "spec": {}}))

    assert str(children["a"].error) == "child a has no spec; give an object"
    assert children["b"].error is None


@pytest.mark.parametrize(
    "env", [{"LD_PRELOAD": "/x"}, {"PythonPath": "/x"}, ["LD_PRELOAD"], "LD_PRELOAD=/x", 1], ids=str
)
def test_a_variable_that_no_task_may_set_fails_its_caller_alone(run: Run, env: Any) -> None:
    prepared = run({"id": "good", "spec": {"env": {"MODE": "a"}}}, {"id": "bad", "spec": {"env": env}})

    good, bad = prepared.request.spec["merge_children"]
    assert bad["error"]["type"] == "RefusedVariable"
    assert "error" not in good
    assert prepared.environment["MODE"] == "a"
    assert not [
        name
        for name in prepared.environment
        if name.upper() in ("LD_PRELOAD", "PYTHONPATH") and "/x" in prepared.environment[name]
    ]
