"""Which models a call of `/v1` may name: those that are kept loaded (`gpuflow serve`), and an allowlist of settings.

What is served is read from the broker at each call, so that a model which is stopped is 404 at once, at every gateway.
"""

from __future__ import annotations

from typing import Any

from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.openai_shapes import Call
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import owner_for
from gpuflow.protocol import whole_text
from gpuflow.serving.models import ServedModel, is_name
from gpuflow.serving.store import ServedModels
from gpuflow.settings import Settings
from gpuflow.spec.presets import list_presets
from gpuflow.tokens.rights import Grant


class Models:
    """The models of one gateway. One that is served for an owner is there for that owner's tokens alone."""

    def __init__(self, settings: Settings, calls: Calls) -> None:
        self._listed = allowed(settings)
        self._calls = calls

    async def listed(self, caller: Grant) -> list[dict[str, Any]]:
        """Return all of them in OpenAI's shape. Raises Problem."""
        served = await self._served(caller)
        shown = [_shown(name, model.created_at) for name, model in served.items()]
        return shown + [_shown(name) for name in self._listed if name not in served]

    async def shown(self, name: str, caller: Grant) -> dict[str, Any]:
        """Return one of them in OpenAI's shape. Raises Problem."""
        model = await self._find(name, caller)
        if model is None and name not in self._listed:
            raise await self._unknown(name, caller)
        return _shown(name, model.created_at if model is not None else 0.0)

    async def task(self, call: Call, spec: dict[str, Any], caller: Grant) -> tuple[dict[str, Any], str]:
        """Return the spec of a call's task, and whose it is. Raises Problem."""
        model = await self._find(call.model, caller)
        if model is not None:
            if model.task_type != spec["taskType"]:
                does = "makes vectors" if model.task_type == "embedding" else "answers chats and continues texts"
                detail = f"the model {call.model[:100]!r} {does} here, and does nothing else; name another model"
                raise Problem(400, "wrong-model", whole_text(detail))
            return {**model.call_spec(spec), "priority": call.priority}, owner_for(caller, model.owner)
        if call.model not in self._listed:
            raise await self._unknown(call.model, caller)
        source = dict(self._listed[call.model])
        return {**spec, "model": {"source": source}, "priority": call.priority}, owner_for(caller, "")

    async def _find(self, name: str, caller: Grant) -> ServedModel | None:
        if not is_name(name):
            return None
        model = await self._calls.run(lambda app: ServedModels(app.redis, app.keys, app.signer).find(name))
        return model if model is not None and _sees(caller, model) else None

    async def _served(self, caller: Grant) -> dict[str, ServedModel]:
        found = await self._calls.run(lambda app: ServedModels(app.redis, app.keys, app.signer).all())
        return {name: model for name, model in found.items() if _sees(caller, model)}

    async def _unknown(self, name: str, caller: Grant) -> Problem:
        names = [*await self._served(caller), *self._listed]
        there = ", ".join(dict.fromkeys(names)) or "none; run `gpuflow serve MODEL`, or set GPUFLOW_SERVED_MODELS"
        detail = f"the model {name[:100]!r} is not served here; there are: {there}"
        return Problem(404, "model_not_found", whole_text(detail))


def allowed(settings: Settings) -> dict[str, dict[str, str]]:
    """Return the models of the allowlist: name -> where the model comes from, as `model.source` of a task has it."""
    presets = set(list_presets("models"))
    found = {}
    for entry in settings.served_models:
        name, separator, place = entry.partition("=")
        place = place if separator else name
        kind = "local" if place.startswith("/") else "preset" if place in presets else "huggingface"
        found[name] = {"type": kind, "identifier": place}
    return found


def _sees(caller: Grant, model: ServedModel) -> bool:
    return not model.owner or caller.sees(model.owner)


def _shown(name: str, created_at: float = 0.0) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "gpuflow"}
