"""Adapters whose configuration names weights or a tokenizer of others: PEFT would open them, wherever they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.modeling.adapter_config import judge_adapter
from executors.training.beginning import Beginning, begin
from tests.fixtures.executor_child import Ended

pytestmark = pytest.mark.ml

XLORA = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": 32}
TUNED = {
    "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2, "prompt_tuning_init": "TEXT",
    "prompt_tuning_init_text": "a",
}  # fmt: skip


def made(folder: Path, config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_the_adapter_of_another_is_not_opened(tmp_path: Path, run: Callable[..., Ended]) -> None:
    private = made(tmp_path / "private", {"peft_type": "LORA"})
    folder = made(tmp_path / "given", {**XLORA, "adapters": {"0": str(private)}})
    opened: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(private)):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    spec = {"data": {"type": "list", "items": ["a"]}, "model": {"adapters": [{"path": str(folder)}]}}

    ended = run("inference", spec)

    assert ended.finish["status"] == "failed"
    assert "names by adapters what lies outside of the adapter" in ended.finish["error"]["message"]
    assert opened == []


def test_an_adapter_that_is_trained_on_is_judged_too(tmp_path: Path) -> None:
    folder = made(tmp_path / "given", {**TUNED, "tokenizer_name_or_path": str(tmp_path / "private")})

    with pytest.raises(ExecutorError, match="names by tokenizer_name_or_path what lies outside"):
        begin(None, Beginning(continued=folder))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [{"megatron_core": "os"}, {"tokenizer_kwargs": {"trust_remote_code": True}}, [], "[" * 100_000, "{"],
    ids=["module", "arguments", "list", "nested", "cut"],
)
def test_a_configuration_that_is_not_judged_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ExecutorError, match=r"adapter_config\.json (names by|is not that of an adapter)"):
        judge_adapter(made(tmp_path / "given", config))


def test_what_peft_writes_of_its_own_is_taken(tmp_path: Path) -> None:
    judge_adapter(
        made(tmp_path / "given", {"peft_type": "LORA", "megatron_config": None, "megatron_core": "megatron.core"})
    )
