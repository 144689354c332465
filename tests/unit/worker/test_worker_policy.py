"""The policy of a worker with its settings: asked before all else, of merged calls one by one, of references."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuflow.cli.checks_policy import policy_checks
from gpuflow.cluster.commands import process_environment
from gpuflow.environments import snapshot
from gpuflow.errors import NotAllowed
from gpuflow.settings import Settings
from gpuflow.worker.child_python import python_of
from gpuflow.worker.merged_inputs import RefusedVariable
from gpuflow.worker.outcome import cause_of
from gpuflow.worker.preparation import PreparedAttempt, prepare
from gpuflow.worker.results_folder import ResultsFolder
from gpuflow.worker.spec_policy import as_operator, policy_of

COMMAND = {"taskType": "command", "command": {"command": "true"}}


def load(tmp_path: Path, **env: str) -> Settings:
    folders = {"RESULTS_DIR": "results", "GPUFLOW_CACHE_DIR": "cache", "GPUFLOW_ENV_DIR": "environments"}
    return Settings.load({**{name: str(tmp_path / folder) for name, folder in folders.items()}, **env}, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., PreparedAttempt]:
    attempts = itertools.count(1)

    def made(spec: dict[str, Any], **env: str) -> PreparedAttempt:
        settings = load(tmp_path, **env)
        return prepare(
            spec,
            python=python_of({"taskType": "echo"}, snapshot(settings, gpus=False)),
            task_id="task",
            attempt=next(attempts),
            gpus=(),
            folder=ResultsFolder(settings.results_dir, "task"),
            settings=settings,
            worker_id="w1",
        )

    return made


def reference(tmp_path: Path, value: Any) -> dict[str, Any]:
    content = json.dumps(value).encode()
    file = tmp_path / "results" / "value.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    place = {"url": file.as_uri(), "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    return {"$artifact": place}


def test_nothing_is_touched_for_what_is_refused(run: Callable[..., PreparedAttempt], tmp_path: Path) -> None:
    load_it = {"load": {"url": "http://127.0.0.1:1/never-asked.tar.gz"}}

    with pytest.raises(NotAllowed, match=r"^worker w1 does not run this: taskType .*_CODE=command on") as no:
        run(COMMAND | {"checkpoint": load_it})

    assert no.value.setting == "GPUFLOW_ALLOW_CODE"
    assert cause_of(no.value)["retryable"] is False
    assert not (tmp_path / "results").exists()
    assert run(COMMAND, GPUFLOW_ALLOW_CODE="command").request.task_type == "command"


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("model", {"vllm": {"worker_cls": "evil.Worker"}}),
        ("model", {"source": {"identifier": "a/b", "trust_remote_code": True}}),
        ("training", {"model_init_kwargs": {"trust_remote_code": True}}),
    ],
)
def test_what_a_reference_loads_is_judged(
    run: Callable[..., PreparedAttempt], tmp_path: Path, section: str, value: dict[str, Any]
) -> None:
    spec = {"taskType": "sft", section: reference(tmp_path, value)}

    with pytest.raises(NotAllowed, match=f"{section}\\."):
        run(spec)
    assert run(spec, GPUFLOW_ALLOW_CODE="all").request.spec[section] == value


@pytest.mark.parametrize("env", [{"PYTHONPATH": "/tmp/${env:X}"}, {"LD_PRELOAD": "/tmp/x"}, ["LD_PRELOAD"], "text", 1])
def test_variables_that_a_reference_loads_are_judged(
    run: Callable[..., PreparedAttempt], tmp_path: Path, env: Any
) -> None:
    with pytest.raises(RefusedVariable):
        run({"taskType": "echo", "env": reference(tmp_path, env)}, GPUFLOW_ALLOW_CODE="all")


def test_of_merged_calls_only_the_one_with_code_is_refused(run: Callable[..., PreparedAttempt], tmp_path: Path) -> None:
    rows = {"type": "list", "items": ["a"]}
    children = [
        {"id": "good", "spec": {"data": rows}},
        {"id": "remote", "spec": {"data": {**rows, "trust_remote_code": True}}},
        {"id": "loaded", "spec": {"inference": reference(tmp_path, {"logits_processors": ["evil:P"]})}},
        {"id": "shell", "spec": COMMAND},
    ]

    prepared = run({"taskType": "inference", "merge_children": children})

    ends = {one["id"]: one.get("error") for one in prepared.request.spec["merge_children"]}
    assert ends["good"] is None
    assert {ends[name]["type"] for name in ("remote", "loaded", "shell")} == {"NotAllowed"}
    assert "GPUFLOW_ALLOW_CODE=plugins" in ends["loaded"]["message"]
    with pytest.raises(NotAllowed, match="worker_cls"):
        run({"taskType": "inference", "model": {"vllm": {"worker_cls": "a.B"}}, "merge_children": children[:1]})


def test_secrets_are_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    monkeypatch.setenv("GPUFLOW_SECRET_THEIRS", "x")
    for name in ("MINE", "../outside", "a\0b"):
        monkeypatch.setenv("MINE", "x")
        found = policy_of(load(tmp_path, GPUFLOW_SECRETS_DIR=str(tmp_path)), "w1").refusal({"secrets": [name]})
        assert (found is not None) == (name == "MINE")
    assert policy_of(load(tmp_path), "w1").refusal({"secrets": ["THEIRS", "NOWHERE"]}) is None
    assert policy_of(load(tmp_path, GPUFLOW_ALLOW_SECRETS="MI*"), "w1").refusal({"secrets": ["MINE"]}) is None
    for odd in (None, "MINE", 7, {"MINE": 1}, [7]):
        assert policy_of(load(tmp_path), "w1").refusal({"secrets": odd}) is None


# -- user and operator are one ----------------------------------------------------------------------------------------


def opened(settings: Settings, tmp_path: Path, **base: str) -> dict[str, str]:
    found = process_environment(settings, "redis://h", base, tmp_path, own_broker=True)
    return {name: found[name] for name in ("GPUFLOW_ALLOW_CODE", "GPUFLOW_ALLOW_SECRETS") if name in found}


def test_a_cluster_with_a_broker_of_its_own_is_open(tmp_path: Path) -> None:
    assert opened(load(tmp_path), tmp_path) == {"GPUFLOW_ALLOW_CODE": "all", "GPUFLOW_ALLOW_SECRETS": "*"}
    passed = process_environment(load(tmp_path), "redis://h", {}, tmp_path, own_broker=True)["GPUFLOW_PASS_ENV"]
    assert {"HF_*", "*_PROXY"} <= set(passed.split(","))


def test_what_was_set_expressly_is_kept(tmp_path: Path) -> None:
    closed = {"GPUFLOW_ALLOW_CODE": "none", "GPUFLOW_ALLOW_SECRETS": "HF_TOKEN"}
    assert opened(load(tmp_path, **closed), tmp_path, **closed) == closed

    (tmp_path / "gpuflow.toml").write_text('allow_code = ["command"]\nallow_secrets = ["A"]\npass_env = ["B"]\n')
    found = as_operator(load(tmp_path))
    assert (found.allow_code, found.allow_secrets, found.pass_env) == (("command",), ("A",), ("B",))


def test_a_cluster_on_a_shared_broker_is_as_closed_as_any_worker(tmp_path: Path) -> None:
    found = process_environment(load(tmp_path), "redis://shared", {}, tmp_path)
    assert not {"GPUFLOW_ALLOW_CODE", "GPUFLOW_ALLOW_SECRETS", "GPUFLOW_PASS_ENV"} & found.keys()


def test_the_doctor_says_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = [check.detail for check in policy_checks(load(tmp_path))]
    assert closed[:2] == ["tasks may bring none (GPUFLOW_ALLOW_CODE)", "tasks may name none"]
    assert closed[2:] == [
        "beside results and cache tasks may read none (GPUFLOW_READ_ROOTS), write none (GPUFLOW_WRITE_ROOTS)",
        "of this machine and private networks tasks may reach none (GPUFLOW_ALLOW_HOSTS)",
    ]
    monkeypatch.setenv("GPUFLOW_SECRET_HF_TOKEN", "x")
    env = {"GPUFLOW_ALLOW_CODE": "all", "GPUFLOW_ALLOW_SECRETS": "TEAM_*", "GPUFLOW_PASS_ENV": "P"}
    env |= {
        "GPUFLOW_READ_ROOTS": "/data,/sets",
        "GPUFLOW_WRITE_ROOTS": "/out",
        "GPUFLOW_ALLOW_HOSTS": "db.lab,10.0.0.0/8",
    }

    code, secrets, folders, hosts = (check.detail for check in policy_checks(load(tmp_path, **env)))

    assert "all kinds: whoever submits runs code as the worker's user" in code
    assert "TEAM_*" in secrets and "HF_TOKEN" in secrets and "every child gets P" in secrets
    assert "read /data, /sets (" in folders and "write /out (" in folders and "reach db.lab, 10.0.0.0/8 (" in hosts
