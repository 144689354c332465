"""Retrieval with real models, by the command line: questions about these very docs, and the example pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ml, pytest.mark.timeout(1200)]

COMMAND = str(Path(sys.executable).with_name("gpuflow"))
DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Question -> what a passage that answers it says.
QUESTIONS = {
    "Which exit code of a command means that it is tried again?": "75 (EX_TEMPFAIL)",
    "How do I keep a token from tasks that do not name it?": "GPUFLOW_SECRETS_DIR",
    "How do models get to a machine without a network?": "gpuflow models export",
    "Which signal tells a child to save a checkpoint and end soon?": "SIGUSR1",
    "How do I drain a worker?": "gpuflow workers drain",
}


def run(template: str, cwd: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [COMMAND, "run", template, "--json"], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {stage["name"]: stage["result"] for stage in json.loads(done.stdout)["stages"]}


@pytest.mark.long
def test_the_passages_cited_from_these_docs_hold_the_answers(environment: dict[str, str], tmp_path: Path) -> None:
    index = {"index": {}, "data": {"upload": str(DOCS)}, "embedding": {"model": "all-minilm-l6-v2"}}
    ask = {"search": {"index": "${index.result.final_index_archive_url}"}, "query": list(QUESTIONS)}
    stages = [{"name": "index", "spec": index}, {"name": "ask", "spec": ask}]
    template = {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "spec": {"taskType": "rag", "stages": stages}}
    (tmp_path / "docs.json").write_text(json.dumps(template))

    results = run("docs.json", tmp_path, environment)

    assert results["index"]["documents"] == len(list(DOCS.rglob("*.md")))
    items = results["ask"]["items"]
    assert [item["input"] for item in items] == list(QUESTIONS)
    for item in items:
        texts = [one["text"] for one in item["citations"]]
        assert any(QUESTIONS[item["input"]] in text for text in texts), (item["input"], texts)


def test_the_example_pipeline_answers_from_its_passages(environment: dict[str, str], tmp_path: Path) -> None:
    items = run("rag", tmp_path, environment)["ask"]["items"]

    assert [item["citations"][0]["source"] for item in items] == ["cards", "loans", "printing"]
    answers = ("ten euros", "one", "beside the entrance")
    assert [text in item["citations"][0]["text"] for text, item in zip(answers, items, strict=True)] == [True] * 3
    assert all(item["output"] for item in items)
