"""validate, explain, submit and run tell the same of a template, in one report, with exit code 2: never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]
HEAD = "apiVersion: gpuflow/v1\nspec:\n"
MODEL = "  model: {source: {identifier: a/b}}\n"
ECHO = f"{HEAD}  taskType: echo\n"
ASK = f"{HEAD}  taskType: inference\n{MODEL}"

#: Text, the lines of the report that have to be there: path (with its line) and words.
HOSTILE: dict[str, tuple[str | bytes, dict[str, str]]] = {
    "crlf": (ECHO.replace("\n", "\r\n") + "  priorty: 1\r\n", {":4: spec.priorty": "'priority'"}),
    "utf-16": (ECHO.encode("utf-16"), {"": "save it as UTF-8"}),
    "tab": (f"{HEAD}\ttaskType: echo\n", {":3": "a tab"}),
    "two documents": (f"{ECHO}---\n{ECHO}", {":4": "a second document"}),
    "slip of a section": (f"{ECHO}  reosurces: {{}}\n", {":4: spec.reosurces": "'resources'"}),
    "slip deep inside": (f"{ASK}  data: {{itmes: [a]}}\n", {":5: spec.data.itmes": "'items'"}),
    "field of a stage beside its spec": (f"{ECHO}  stages: [{{name: a, priority: 3}}]\n", {"priority": "under spec"}),
    "section of another type": (f"{ECHO}  lora: {{r: 4}}\n", {":4: spec.lora": "belongs to"}),
    "part of another type": (
        f"{HEAD}  taskType: sft\n  model: {{source: {{identifier: a/b}}, vllm: {{max_model_len: 9}}}}\n"
        "  data: {items: [{text: a}]}\n",
        {":4: spec.model.vllm": "belongs to"},
    ),
    "yaml 1.1": (f"{ECHO}  data: {{items: [a]}}\n  parallel: {{enabled: yes}}\n", {"max_shards": "is missing"}),
    "no rows": (f"{ASK}  data: {{items: []}}\n", {":5: spec.data.items": "an empty list"}),
    "given twice": (f"{ECHO}  priority: 1\n  priority: 2\n", {":4: spec.priority": "lines 4 and 5"}),
    "stage twice": (f"{ECHO}  stages: [{{name: a}}, {{name: a}}]\n", {"stages[1].name": "another stage"}),
    "cycle": (
        f"{ECHO}  graph: {{nodes: [{{name: a, dependsOn: [b]}}, {{name: b, dependsOn: [a]}}]}}\n",
        {"graph.nodes[0].dependsOn": "a -> b -> a"},
    ),
    "no such stage": (
        f"{ECHO}  stages: [{{name: a, spec: {{echo: {{message: '${{z.x}}'}}}}}}]\n",
        {"message": "there is no stage 'z'"},
    ),
    "a reference as key": (
        f"{ECHO}  stages: [{{name: a}}, {{name: b, spec: {{echo: {{output: {{'${{a.x}}': 1}}}}}}}}]\n",
        {"echo.output": "keys are not replaced"},
    ),
    "no shards": (f"{ECHO}  data: {{items: [1]}}\n  parallel: {{max_shards: 0}}\n", {"max_shards": "at least 1"}),
    "matrix of nothing": (f"{ECHO}  stages: [{{name: a, matrix: {{echo.steps: []}}}}]\n", {"steps": "at least one"}),
    "matrix over itself": (
        f"{ECHO}  stages: [{{name: a, matrix: {{echo.steps: [1], echo: [{{}}]}}}}]\n",
        {"matrix.echo": "keep one"},
    ),
    "a huge number": (f"{ECHO}  timeout: {'9' * 400}\n", {":4: spec.timeout": "too large"}),
    "a name in letters of others": (f"{ECHO}  stages: [{{name: détail}}]\n", {"name": "letters, digits"}),
    "alias of nothing": (f"{ECHO}  echo: {{message: *x}}\n", {":4: spec.echo.message": "&x"}),
    "theirs in ours": (f"{ECHO}  enforce_cpu: true\n", {":4: spec.enforce_cpu": "unknown field"}),
    "slip in theirs": ("apiVersion: flowmesh/v1\nspec:\n  taskType: echo\n  timout: 3\n", {"timout": "'timeout'"}),
    "a file that is not here": (
        f"{ASK}  data: {{upload: ./nowhere.jsonl}}\n",
        {":5: spec.data.upload": "no file here"},
    ),
    "a folder that is not here": (
        f"{HEAD}  taskType: command\n  command: {{command: ls, project: ./nowhere}}\n",
        {":4: spec.command.project": "no folder here"},
    ),
    "two places": (
        f"{ECHO}  stages: [{{name: a, spec: {{target: local}}}}, {{name: b}}]\n",
        {"stages[1].spec.target": "one place"},
    ),
    "several at once, and a warning": (
        f"{ASK}  data: {{upload: ./nowhere.jsonl, split: x}}\n  priorty: 1\n  sloSeconds: 3\n",
        {
            ":5: spec.data.split": "type dataset",
            ":6: spec.priorty": "'priority'",
            ":7: spec.sloSeconds": "is not used",
        },
    ),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    started: list[object] = []
    monkeypatch.setattr("gpuflow.cli.run.run_local", lambda *args, **kwargs: started.append(args) or 0)
    return started


@pytest.mark.parametrize("name", HOSTILE)
def test_all_commands_tell_the_same(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_starts: list[object], name: str
) -> None:
    text, lines = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    Path("hostile.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    shown = [invoke(command, "hostile.yaml") for command in ("validate", "explain", "submit", "run")]

    assert {one.exit_code for one in shown} == {2}
    assert len({one.stderr for one in shown}) == 1
    assert not nothing_starts
    told = shown[0].stderr.splitlines()
    for place, words in lines.items():
        assert any(place in line and words in line for line in told), told
    assert "Traceback" not in shown[0].stderr


def test_what_depends_on_results_is_explained_as_far_as_it_is_known(
    invoke: Invoke, tmp_path: Path, nothing_starts: list[object]
) -> None:
    file = tmp_path / "pending.yaml"
    file.write_text(
        f"{ECHO}  stages:\n    - {{name: a}}\n    - {{name: b, spec: {{resources: '${{a.result.ask}}'}}}}\n"
        "    - {name: c, spec: {resources: {hardware: {cpu: 1, memory: '${a.result.memory}'}}}}\n"
    )

    shown = invoke("explain", str(file))

    assert (shown.exit_code, invoke("validate", str(file)).exit_code) == (0, 0)
    assert shown.stdout.count("its resources refer to results") == 2
