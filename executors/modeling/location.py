"""Where a model is: from the `model` section of a spec to a folder or a hub id that `from_pretrained` takes.

Imports no torch. Presets are prepared here on first use, by `modeling.presets`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executors import task_access
from executors.base import bad_input
from executors.modeling.hub import hold_model
from executors.modeling.presets import prepare
from gpuflow.protocol import Emitter
from gpuflow.spec.presets import load_preset


@dataclass(frozen=True, kw_only=True)
class Location:
    """A model for `from_pretrained(place, **options)`; `name` is what the user calls it."""

    name: str
    place: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Arguments of from_pretrained that the preset suggests for inference.
    inference: Mapping[str, Any] = field(default_factory=dict)


def resolve(model: Mapping[str, Any] | None, cache_dir: str | None, emitter: Emitter) -> Location:
    """Return where the model of a spec is, fetched and converted if it is a preset with files of its own.

    Raises ExecutorError: BadInput for a missing section or folder, and what `presets.prepare` raises.
    """
    source = (model or {}).get("source") or {}
    identifier = source.get("identifier")
    if not identifier:
        raise bad_input("the task names no model; set model.source.identifier")
    options = {
        key: source[key] for key in ("revision", "subfolder", "gguf_file", "trust_remote_code") if source.get(key)
    }
    kind = source.get("type") or ("local" if Path(identifier).is_dir() else "huggingface")
    if kind == "preset":
        return _preset(identifier, options, cache_dir, emitter)
    if kind == "local":
        return local(task_access.folder(identifier, "model.source.identifier"), options, name=identifier)
    if Path(identifier).is_dir():  # the libraries would read it as a folder
        task_access.folder(identifier, "model.source.identifier")
    hold_model(identifier, cache_dir)
    return Location(name=identifier, place=identifier, options=options)


def _preset(name: str, options: dict[str, Any], cache_dir: str | None, emitter: Emitter) -> Location:
    preset = load_preset("models", name)
    source = preset["source"]
    suggested = preset.get("transformers") or {}
    if source["type"] == "huggingface":
        given = {key: source[key] for key in ("revision", "subfolder", "gguf_file") if source.get(key)}
        hold_model(source["identifier"], cache_dir)
        return Location(name=name, place=source["identifier"], options={**given, **options}, inference=suggested)
    if source["type"] == "local":
        return local(Path(source["identifier"]).expanduser(), options, name=name)
    folder = prepare(name, preset, cache_dir, emitter)
    return Location(name=name, place=str(folder), inference=suggested)


def local(folder: Path, options: Mapping[str, Any] | None = None, *, name: str | None = None) -> Location:
    """Return the location of a folder on this machine. Raises ExecutorError: BadInput if it holds no model."""
    subfolder = (options or {}).get("subfolder") or ""
    if not folder.is_dir():
        raise bad_input(f"{folder} is no folder on this machine; give the path of a model folder, or a hub id")
    if not (folder / subfolder / "config.json").is_file() and not (options or {}).get("gguf_file"):
        raise bad_input(f"{folder / subfolder} holds no model: there is no config.json in it")
    return Location(name=name or folder.name, place=str(folder.absolute()), options=dict(options or {}))


def adapter_folder(path: str | Path) -> Path | None:
    """Return the folder of a PEFT adapter: `path` itself or its only subfolder; None if it is none.

    Raises ExecutorError: BadInput if the path is no folder.
    """
    folder = weights_folder(path)
    return folder if (folder / "adapter_config.json").is_file() else None


def weights_folder(path: str | Path) -> Path:
    """Return the folder that holds weights: `path`, or its only subfolder, as archives have it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise bad_input(f"{folder} is no folder on this machine; give the folder of a model or of a LoRA adapter")
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    if len(entries) == 1 and entries[0].is_dir():
        return entries[0]
    return folder


def adapter_base(folder: Path) -> str | None:
    """Return the name of the model that an adapter was trained on, if the adapter tells."""
    content = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    base = content.get("base_model_name_or_path")
    return str(base) if base else None
