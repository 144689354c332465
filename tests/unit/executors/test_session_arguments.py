"""What a session makes of a spec: vLLM's arguments, and the texts and pooling of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.modeling.location import Location
from executors.sessions.memory import total_mib, used_bytes
from executors.sessions.vllm_arguments import (
    engine_arguments,
    lora_arguments,
    memory_arguments,
    sampling_arguments,
)
from executors.vectors.pooling import Pooling, read_pooling
from executors.vectors.texts import read_texts

# -- vLLM's arguments --------------------------------------------------------------------------------------------

KNOWN = {"max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "disable_log_stats", "enable_lora"}


def test_engine_arguments_follow_from_the_gpus_unless_given() -> None:
    assert engine_arguments({"max_model_len": 8}, ["GPU-1", "GPU-2"], KNOWN) == {
        "max_model_len": 8,
        "tensor_parallel_size": 2,
        "disable_log_stats": True,
    }
    assert "tensor_parallel_size" not in engine_arguments({"pipeline_parallel_size": 2}, ["a", "b"], KNOWN)
    assert "tensor_parallel_size" not in engine_arguments({}, [], KNOWN)


@pytest.mark.parametrize(("name", "says"), [("max_modle_len", "max_model_len"), ("model", "set by gpuflow")])
def test_unknown_engine_arguments_are_named(name: str, says: str) -> None:
    with pytest.raises(ExecutorError, match=says):
        engine_arguments({name: 1}, [], KNOWN)


def test_room_for_adapters_does_not_depend_on_whose_came_first() -> None:
    assert lora_arguments({}, adapted=False) == {}
    assert lora_arguments({}, adapted=True) == {"enable_lora": True, "max_lora_rank": 64, "max_loras": 4}
    assert lora_arguments({"enable_lora": True}, adapted=False) == {"max_lora_rank": 64, "max_loras": 4}
    assert lora_arguments({"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}, adapted=True) == {}


def test_an_engine_stays_within_its_share_of_a_gpu() -> None:
    assert memory_arguments({}, None, 24_576) == {}
    assert memory_arguments({}, 8_192, None) == {}
    assert memory_arguments({}, 8_192, 24_576) == {"gpu_memory_utilization": 0.3333}
    assert memory_arguments({}, 99_999, 24_576) == {"gpu_memory_utilization": 1.0}
    assert memory_arguments({"gpu_memory_utilization": 0.2}, 8_192, 24_576) == {}


def test_the_memory_of_the_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"GPU-1": 24, "GPU-2": 16}
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda uuid: SimpleNamespace(total=sizes[uuid] << 30, used=1 << 30),
    )
    monkeypatch.setattr("executors.sessions.memory._library", lambda: library)

    assert total_mib(["GPU-1", "GPU-2"]) == 16 * 1024
    assert used_bytes(["GPU-1", "GPU-2"]) == 2 << 30
    assert total_mib([]) is None


@pytest.mark.parametrize("asked", [{"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 9 << 30}])
def test_more_than_its_share_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ExecutorError, match=f"{next(iter(asked))}.* 8192 of the 24576 MiB") as raised:
        memory_arguments(asked, 8_192, 24_576)
    assert raised.value.type == "BadInput"


def test_sampling_arguments_are_those_of_the_schema() -> None:
    inference = {"temperature": 0, "stream": True, "system_prompt": "x", "top_p": None, "logit_bias": {"5": 1.0}}
    assert sampling_arguments(inference) == {"temperature": 0, "max_tokens": 256, "logit_bias": {5: 1.0}}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("temprature", 1, "temperature"), ("output_kind", 1, "use stream"), ("logit_bias", {"x": 1}, "token ids")],
)
def test_unknown_sampling_arguments_are_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ExecutorError, match=says):
        sampling_arguments({name: value})


# -- vectors -----------------------------------------------------------------------------------------------------


def test_texts_of_entries() -> None:
    texts = read_texts(["a", {"text": "b"}, {"x": 1, "passage": "c"}], {}, "query: ")
    assert [text.text for text in texts] == ["query: a", "query: b", "query: c"]
    assert [text.text for text in read_texts([{"x": "a", "text": "b"}], {"columns": {"text": "x"}})] == ["a"]


@pytest.mark.parametrize(("entry", "says"), [({"x": 1}, "its columns are: x"), (7, "int"), ("", "str")])
def test_an_entry_without_text_is_named(entry: Any, says: str) -> None:
    with pytest.raises(ExecutorError, match=says):
        read_texts([entry], {})


def _sentence_model(folder: Path, pooling: dict[str, Any], *modules: str) -> Location:
    kinds = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in modules]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    return Location(name="model", place=str(folder))


def test_pooling_is_what_the_model_says(tmp_path: Path) -> None:
    assert read_pooling(Location(name="bare", place=str(tmp_path))) == Pooling(mode="mean", normalize=True)
    said = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 8}
    location = _sentence_model(tmp_path, said, "Transformer", "Pooling")
    assert read_pooling(location) == Pooling(mode="cls", normalize=False, max_tokens=64)


@pytest.mark.parametrize(
    ("pooling", "modules", "says"),
    [
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "Dense"),
        ({"pooling_mode": "weightedmean"}, ("Transformer", "Pooling"), "weightedmean"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("Pooling",), "and"),
    ],
)
def test_pooling_that_is_not_done_here_is_refused(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ExecutorError, match=says):
        read_pooling(_sentence_model(tmp_path, pooling, *modules))
