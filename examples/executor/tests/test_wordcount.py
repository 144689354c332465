"""The executor in this process: fast, and enough for what it computes. `gpuflow executor run` shows the rest."""

# ruff: noqa: D103, S101

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from acme_wordcount.executor import WordCount

from executors.base import ExecutorError
from gpuflow.protocol import Emitter, Request, parse_line


def run(folder: Path, **spec: Any) -> tuple[dict[str, Any], list[str]]:
    told = io.StringIO()
    request = Request(task_id="test", task_type="acme.wordcount", spec=spec, output_dir=str(folder))
    result = WordCount().run(request, Emitter(told))
    return result, [parse_line(line).name for line in told.getvalue().splitlines()]


def test_the_most_frequent_words_of_each_text(tmp_path: Path) -> None:
    result, events = run(tmp_path, data={"type": "list", "items": ["to be or not to be"]}, parameters={"top": 2})

    assert result["items"][0]["output"] == {"to": 2, "be": 2}
    assert json.loads((tmp_path / "responses.json").read_text()) == result
    assert events == ["worker", "progress", "artifact"]


def test_a_wrong_parameter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=r"parameters\.top is 0"):
        run(tmp_path, data={"type": "list", "items": ["a"]}, parameters={"top": 0})
