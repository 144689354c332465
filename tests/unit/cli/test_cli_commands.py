"""The commands that need no fleet, and how all of them fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpuflow.cli import SECTIONS
from tests.support.waiting import patient

Invoke = Callable[..., Result]


ECHO = "apiVersion: gpuflow/v1\nmetadata: {name: hello}\nspec:\n  taskType: echo\n  data: {type: list, items: [a]}\n"
COMMANDS = [name for section in SECTIONS.values() for name in section]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(invoke: Invoke, command: str) -> None:
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert "Usage: gpuflow" in shown.stdout


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom gpuflow.cli import cli\n"
        "shown = CliRunner().invoke(cli, ['--help'])\nassert shown.exit_code == 0\nprint(shown.output)\n"
        "print('HEAVY', [n for n in ('celery', 'redis', 'rich', 'pydantic', 'torch') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=True)
    assert "HEAVY []" in done.stdout
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_version(invoke: Invoke) -> None:
    from gpuflow.build import full_version

    assert invoke("--version").stdout.strip() == f"gpuflow {full_version()}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run"],
        ["run", "--nonsense", "x"],
        ["status", "--limit", "x"],
        ["submit", "x", "--target", "moon"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(invoke: Invoke, arguments: list[str]) -> None:
    told = invoke(*arguments)
    assert told.exit_code == 2
    assert told.stdout == ""
    assert told.stderr.startswith("gpuflow: ")
    assert len(told.stderr.splitlines()) == 1
    assert "--help" in told.stderr


@pytest.mark.parametrize(
    "command", ["status", "queues", "workers", "cancel x", "logs x", "result x", "retry x", "resume x"]
)
def test_without_any_fleet_the_error_names_the_mend(invoke: Invoke, command: str) -> None:
    told = invoke(*command.split())
    assert told.exit_code == 1
    assert "gpuflow up" in told.stderr
    assert len(told.stderr.splitlines()) == 1


def test_an_unreachable_broker_is_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    monkeypatch.setenv("GPUFLOW_SUBMIT_TIMEOUT_SEC", "2")  # the first try is over by then
    told = invoke("queues")
    assert told.exit_code == 1
    waits, ends = told.stderr.splitlines()
    assert waits.startswith("the broker does not answer") and "waiting 2 s for it" in waits
    assert ends.startswith("gpuflow: the broker cannot be reached")
    assert "secret" not in told.stderr


@pytest.mark.parametrize("command", ["queues", "run t.yaml", "up", "submit t.yaml", "cancel --all", "audit"])
def test_whether_a_command_waits_for_its_broker_can_be_chosen(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    (tmp_path / "t.yaml").write_text(ECHO)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr("gpuflow.broker.waiting.time.sleep", lambda _: None)
    monkeypatch.setenv("GPUFLOW_SUBMIT_TIMEOUT_SEC", "0.2")
    told = invoke(*command.split()).stderr
    assert "waiting 0.2 s for it" in told and "GPUFLOW_SUBMIT_TIMEOUT_SEC=0 does not wait" in told
    monkeypatch.setenv("GPUFLOW_SUBMIT_TIMEOUT_SEC", "0")
    told_at_once = invoke(*command.split())
    assert told_at_once.exit_code == 1 and "waiting" not in told_at_once.stderr


@pytest.mark.parametrize("command", ["run t.yaml", "up", "submit t.yaml", "submit t.yaml --target local"])
def test_nothing_is_started_for_an_unreachable_broker(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    (tmp_path / "t.yaml").write_text(ECHO)
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    told = invoke(*command.split())
    assert told.exit_code == 1
    assert len([line for line in told.stderr.splitlines() if line.startswith("gpuflow: ")]) == 1
    assert "REDIS_URL" in told.stderr
    assert "secret" not in told.stderr


def test_a_bad_setting_is_bad_input(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLOW_LEASE_SEC", "soon")
    told = invoke("status")
    assert told.exit_code == 2
    assert "GPUFLOW_LEASE_SEC" in told.stderr


def test_validate_a_good_template(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(ECHO)
    told = invoke("validate", str(path))
    assert told.exit_code == 0
    assert "valid" in told.stdout
    shown = json.loads(invoke("validate", str(path), "--json").stdout)
    assert shown["valid"] is True
    assert shown["stages"] == [{"name": "hello", "taskType": "echo", "dependsOn": []}]


def test_validate_says_what_code_a_template_brings(invoke: Invoke) -> None:
    text = "apiVersion: gpuflow/v1\nmetadata: {name: x}\nspec: {taskType: command, command: {command: ls}}\n"

    told = invoke("validate", "-", input=text)

    assert told.exit_code == 0
    assert "brings code (command)" in told.stderr and "GPUFLOW_ALLOW_CODE" in told.stderr
    assert list(json.loads(invoke("validate", "-", "--json", input=text).stdout)["code"].values()) == [["command"]]


def test_validate_reads_stdin(invoke: Invoke) -> None:
    assert invoke("validate", "-", input=ECHO).exit_code == 0
    assert invoke("validate", "-", "--set", "priority=1", input=ECHO).exit_code == 0
    told = invoke("validate", "-", input=b"\xff\xfe\x00")
    assert told.exit_code == 2
    assert "UTF-8" in told.stderr


WRONG: dict[str, str | bytes] = {
    "empty": "",
    "no mapping": "[1]",
    "version": "apiVersion: v9\nspec: {taskType: echo}",
    "no task type": "apiVersion: gpuflow/v1\nspec: {}",
    "unknown type": "apiVersion: gpuflow/v1\nspec: {taskType: dance}",
    "unknown field": ECHO + "  colour: red\n",
    "two mistakes": ECHO + "  colour: red\n  priority: 99\n",
    "cycle": "apiVersion: gpuflow/v1\nspec:\n  taskType: echo\n  graph:\n    nodes:\n"
    "      - {name: a, dependsOn: [b], spec: {}}\n      - {name: b, dependsOn: [a], spec: {}}\n",
    "missing reference": "apiVersion: gpuflow/v1\nspec:\n  taskType: echo\n  stages:\n"
    "    - {name: a, spec: {data: {type: list, items: ['${nope.result.x}']}}}\n",
    "bomb": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(12)),
    "not utf-8": b"apiVersion: \xff\xff",
    "control characters": b'apiVersion: gpuflow/v1\nspec: {taskType: "\\e[31mred"}',
    "tab": "apiVersion: gpuflow/v1\n\tspec: x",
    "huge": b"#" * (50 * 1024 * 1024),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_template_is_a_report_and_exit_2(invoke: Invoke, tmp_path: Path, name: str, as_json: bool) -> None:
    path = tmp_path / "wrong.yaml"
    text = WRONG[name]
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    told = invoke("validate", str(path), *(["--json"] if as_json else []))
    assert told.exit_code == 2
    if as_json:
        shown: dict[str, Any] = json.loads(told.stdout)
        assert shown["valid"] is False
        assert shown["mistakes"]
        assert set(shown["mistakes"][0]) == {"path", "line", "message"}
    else:
        assert told.stdout == ""
        lines = told.stderr.splitlines()
        assert all("wrong.yaml" in line for line in lines)
        assert "\x1b" not in told.stderr
        if name == "two mistakes":
            assert len(lines) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_validate_refuses_an_upload_that_is_not_here(tmp_path: Path, invoke: Invoke, as_json: bool) -> None:
    path = tmp_path / "echo.yaml"
    path.write_text("apiVersion: gpuflow/v1\nspec: {taskType: echo, data: {upload: ./rows.jsonl}}\n")

    told = invoke("validate", str(path), *(["--json"] if as_json else []))
    assert told.exit_code == 2
    assert f"{tmp_path / 'rows.jsonl'} is no file here" in told.output

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    assert invoke("validate", str(path)).exit_code == 0


@pytest.mark.parametrize("command", ["run", "submit", "explain", "validate"])
def test_a_missing_file_is_bad_input_everywhere(invoke: Invoke, command: str) -> None:
    told = invoke(command, "no-such-file.yaml")
    assert told.exit_code == 2
    assert "no-such-file.yaml" in told.stderr


def test_run_starts_nothing_for_a_wrong_template(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("apiVersion: gpuflow/v1\nspec: {taskType: dance}")
    assert invoke("run", str(path)).exit_code == 2
    assert not (tmp_path / "state").exists()


def test_explain_without_a_fleet_compares_with_this_machine(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(ECHO + "  resources: {hardware: {memory: 100000Gi}}\n")
    shown = json.loads(invoke("explain", str(path), "--json").stdout)
    assert [task["queue"] for task in shown] == ["cpu-ram100000g"]
    [worker] = shown[0]["workers"]
    assert worker["fits"] is False
    assert "memory" in worker["reasons"][0]
    assert "memory" in invoke("explain", str(path)).stdout


def test_hardware(invoke: Invoke) -> None:
    shown = json.loads(invoke("hardware", "--json").stdout)
    assert shown["cpu_count"] >= 1
    assert isinstance(shown["gpus"], list)
    assert "cpus" in invoke("hardware").stdout


def test_presets(invoke: Invoke) -> None:
    shown = json.loads(invoke("presets", "gpus", "--json").stdout)
    assert {"kind": "gpus", "name": "catalogue", "about": ""} in shown
    assert invoke("presets").exit_code == 0
    rows = json.loads(invoke("presets", "containers", "--json").stdout)
    assert [row["name"] for row in rows] == ["loading-session", "loading-worker"]
    told = invoke("presets", "cats")
    assert told.exit_code == 2
    assert "pipelines" in told.stderr


def test_models(invoke: Invoke) -> None:
    shown = json.loads(invoke("models", "list", "--json").stdout)
    assert "smollm2-135m-instruct" in [model["name"] for model in shown]
    assert invoke("models", "--json").stdout == invoke("models", "list", "--json").stdout
    told = invoke("models", "pull", "smollm")
    assert told.exit_code == 2
    assert "smollm2-135m-instruct" in told.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from gpuflow.cli import cli

    quiet = CliRunner().invoke(cli, ["validate", "nothing.yaml"])
    loud = CliRunner().invoke(cli, ["--debug", "validate", "nothing.yaml"])
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    monkeypatch.setenv("GPUFLOW_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(cli, ["validate", "nothing.yaml"]).stderr


def test_a_bug_is_one_line_that_asks_for_a_report(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("gpuflow.fleet.hardware.probe", broken)
    told = invoke("hardware")
    assert told.exit_code == 1
    assert told.stderr.splitlines() == [
        "gpuflow: internal error: ZeroDivisionError: boom; run it again with --debug and report the traceback"
    ]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    code = "from gpuflow.cli import main; main()"
    command = f"{sys.executable} -c '{code}' presets | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_ctrl_c_has_its_own_exit_code(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuflow.fleet.hardware.probe", interrupted)
    assert invoke("hardware").exit_code == 130


def test_validate_tells_warnings_beside_mistakes_and_where_results_go(invoke: Invoke, tmp_path: Path) -> None:
    spec = {"taskType": "echo", "data": {"items": ["a"]}, "output": {"destination": {"type": "http"}}}
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"apiVersion": "flowmesh/v1", "spec": {**spec, "sloSeconds": 1, "priority": 12}}))
    told = json.loads(invoke("validate", str(file), "--json").stdout)
    assert [one["path"] for one in told["mistakes"]] == ["spec.priority"]
    assert {one["path"] for one in told["warnings"]} == {"spec.sloSeconds", "spec.output.destination"}
    shown = invoke("validate", str(file))
    assert shown.exit_code == 2
    assert "warning: " in shown.stderr

    file.write_text(json.dumps({"apiVersion": "flowmesh/v1", "spec": spec}))
    assert "`gpuflow run` keeps them" in invoke("validate", str(file)).stderr
    assert "`gpuflow run` keeps them" in invoke("explain", str(file)).stderr


def test_validate_and_explain_tell_what_a_foreign_training_got(invoke: Invoke, tmp_path: Path) -> None:
    spec = {
        "taskType": "sft",
        "model": {"source": {"identifier": "example/chat-1b"}},
        "data": {"dataset_name": "a/b", "prompt_column": "q", "response_column": "a"},
        "training": {"num_train_epochs": 2},
    }
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"apiVersion": "flowmesh/v1", "spec": spec}))
    words = "spec.training: is left out in part, and filled in as FlowMesh has it: learning_rate 5e-05, per_device"
    shown = invoke("validate", str(file))
    assert (shown.exit_code, words in shown.stderr, "warning" in shown.stderr) == (0, True, False)
    assert words in invoke("explain", str(file)).stderr
    (filled,) = json.loads(invoke("validate", str(file), "--json").stdout)["filled"]
    assert filled["path"] == "spec.training"

    file.write_text(json.dumps({"apiVersion": "gpuflow/v1", "spec": {**spec, "data": {"prompts": ["a"]}}}))
    assert "filled in" not in invoke("validate", str(file)).stderr
    assert json.loads(invoke("validate", str(file), "--json").stdout)["filled"] == []


@pytest.mark.parametrize("accelerators", ["A100:H100:2", "A100:99999999999999999999"])
def test_validate_and_explain_refuse_the_same_accelerators(invoke: Invoke, tmp_path: Path, accelerators: str) -> None:
    file = tmp_path / "wrong.json"
    resources = {"accelerators": accelerators}
    file.write_text(json.dumps({"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "resources": resources}}))
    told = [invoke(command, str(file)) for command in ("validate", "explain")]
    assert {one.exit_code for one in told} == {2}
    assert len({one.stderr for one in told}) == 1
    assert "spec.resources.accelerators" in told[0].stderr
