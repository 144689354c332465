"""Loads the base model of a session with transformers: that of `model`, or of the checkpoint; never with adapters."""

from __future__ import annotations

from typing import Any

from executors.modeling.libraries import prepare_libraries
from executors.modeling.location import Location
from executors.sessions.lines import Open
from gpuflow.importing import loading
from gpuflow.protocol import Emitter, Request


def locate_base(opening: Open, emitter: Emitter) -> Location:
    """Return where the model of a session is, prepared if need be. Raises ExecutorError."""
    from executors.modeling.loading import locate

    spec: dict[str, Any] = {"model": {**(opening.spec.get("model") or {}), "adapters": None}}
    name = (opening.spec.get("embedding") or {}).get("model")
    if name and not spec["model"].get("source"):
        spec["model"]["source"] = named_source(name)
    request = Request(
        task_id="session",
        task_type=opening.task_type,
        spec=spec,
        output_dir="",
        cache_dir=opening.cache_dir,
        checkpoint_path=opening.checkpoint_path,
    )
    return locate(request, emitter)[0]


def named_source(name: str) -> dict[str, Any]:
    """Return the source of a model that is given by a bare name: a shipped preset, a folder, or a hub id."""
    from gpuflow.spec.presets import list_presets

    return {"identifier": name, "type": "preset"} if name in list_presets("models") else {"identifier": name}


def load_base(
    opening: Open, emitter: Emitter, *, padding_side: str, headless: bool = False
) -> tuple[Location, Any, Any, str | None]:
    """Return location, model (`headless`: without its output layer), tokenizer and resolved revision."""
    prepare_libraries()
    emitter.status("loading", "loading the model")
    with loading():
        import torch
        from transformers import AutoModel, AutoModelForCausalLM

    from executors.modeling.loading import load_model, load_tokenizer
    from executors.modeling.precision import inference_options

    location = locate_base(opening, emitter)
    tokenizer = load_tokenizer(location, padding_side=padding_side)
    options = {**inference_options(location), **((opening.spec.get("model") or {}).get("transformers") or {})}
    if torch.cuda.device_count() > 1:
        options.setdefault("device_map", "auto")
    model = load_model(location, options, AutoModel if headless else AutoModelForCausalLM)
    return location, model, tokenizer, revision_of(model.config, location)


def revision_of(config: Any, location: Location) -> str | None:
    """Return the commit of a model of the hub, else the revision that was asked for; None for a folder."""
    return getattr(config, "_commit_hash", None) or location.options.get("revision")
