"""Adapters on the one model of a session: whoever asks without one is answered as if none had ever been there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.sessions.adapter_switch import AdapterSwitch
from executors.sessions.adapters import Adapter
from tests.fixtures.tiny_adapter import make_tiny_adapter

pytestmark = pytest.mark.ml

Logits = Callable[[Sequence[Adapter]], Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_tiny_adapter(tiny_model, folder / "adapter", folder / "merged")


@pytest.fixture
def logits(tiny_model: Path) -> Iterator[Logits]:
    """What the one model gives with adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    switch = AdapterSwitch(AutoModelForCausalLM.from_pretrained(tiny_model).eval())

    def of(adapters: Sequence[Adapter]) -> Any:
        with torch.inference_mode(), switch.using(adapters) as model:
            return model(torch.tensor([[5, 6, 7, 8]])).logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield of


def adapter(folder: Path, weight: float = 1.0) -> Adapter:
    return Adapter(path=folder, weight=weight, digest=folder.name)


def changed(good: Path, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of the adapter whose configuration and weights `change` has had in hand."""
    from safetensors.torch import load_file, save_file

    config = json.loads((good / "adapter_config.json").read_text())
    weights = load_file(good / "adapter_model.safetensors")
    change(config, weights)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    return folder


def _other_shape(config: dict[str, Any], weights: dict[str, Any]) -> None:
    last = sorted(weights)[-1]
    weights[last] = weights[last][:-8]


def _other_layers(config: dict[str, Any], weights: dict[str, Any]) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace(".layers.1.", ".layers.7.")] = weights.pop(name)


def _other_kind(config: dict[str, Any], weights: dict[str, Any]) -> None:
    config["target_modules"] = ["q_proj", "rotary_emb"]


def _no_such_module(config: dict[str, Any], weights: dict[str, Any]) -> None:
    config["target_modules"] = ["nothing"]


def _of_the_model(config: dict[str, Any], weights: dict[str, Any]) -> None:
    import torch

    weights["base_model.model.model.layers.0.self_attn.k_proj.weight"] = torch.zeros(128, 128)


def _biases(config: dict[str, Any], weights: dict[str, Any]) -> None:
    config["bias"] = "all"


BAD = (_other_shape, _other_layers, _other_kind, _no_such_module, _of_the_model, _biases)


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_one_that_does_not_fit_is_refused_and_changes_nobodys_answer(
    logits: Logits, good: Path, tmp_path: Path, tiny_model: Path, change: Any
) -> None:
    bad = adapter(changed(good, tmp_path / "bad", change))
    plain = _plain(tiny_model)

    for tried in ([bad], [adapter(good, 0.5), bad], [bad, adapter(good)]):
        with pytest.raises(ExecutorError, match="bad") as raised:
            logits(tried)
        assert (raised.value.type, raised.value.retryable) == ("BadInput", False)
        assert logits([]).equal(plain)

    tuned = logits([adapter(good)])
    assert not tuned.allclose(plain, atol=1e-2)
    with pytest.raises(ExecutorError):
        logits([bad])
    assert logits([]).equal(plain)
    assert logits([adapter(good)]).equal(tuned)


def test_a_failure_that_is_not_the_adapters_stays_what_it_is(
    logits: Logits, good: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(PeftModel, "load_adapter", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            logits([adapter(good)])

    assert logits([]).equal(_plain(tiny_model))
    assert not logits([adapter(good)]).equal(logits([]))


def _plain(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(model).eval()(torch.tensor([[5, 6, 7, 8]])).logits
