"""What an adapter says of its base model: what PEFT can load, not what gpuflow calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executors.modeling.location import Location
from executors.training.saving import save_final


class _Saved:
    """A model or a tokenizer that writes one file."""

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        self._name = name
        self._content = content

    def save_pretrained(self, folder: Path, **_options: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / self._name).write_text(json.dumps(self._content))


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (Location(name="smollm2-135m-instruct", place="/cache/models/smollm2"), ("/cache/models/smollm2", None)),
        (Location(name="llama", place="org/llama", options={"revision": "v1"}), ("org/llama", "v1")),
    ],
    ids=["prepared-preset", "preset-of-the-hub"],
)
def test_an_adapter_names_its_base_as_peft_loads_it(tmp_path, base, expected):
    model = _Saved("adapter_config.json", {"base_model_name_or_path": "x", "revision": None, "r": 4})

    save_final(model, _Saved("tokenizer.json", {}), tmp_path / "final_lora", base=base)

    config = json.loads((tmp_path / "final_lora" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"], config["r"]) == (*expected, 4)
