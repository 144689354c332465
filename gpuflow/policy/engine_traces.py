"""Refuses a task that chooses where its engine sends traces: the collector is the operator's choice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuflow.policy.refusal import Refusal

#: Arguments of vLLM that send traces of each request, or choose what is in them.
_FIELDS: Final = ("otlp_traces_endpoint", "collect_detailed_traces")


def refusal(spec: Mapping[str, Any]) -> Refusal | None:
    """Return why a spec is refused, or None. Nothing is taken for granted of its form."""
    model = spec.get("model")
    section = model.get("vllm") if isinstance(model, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    given = {str(name).strip().lower().replace("-", "_") for name, value in section.items() if value}
    field = next((name for name in _FIELDS if name in given), None)
    if field is None:
        return None
    return Refusal(
        path=f"model.vllm.{field}",
        setting="GPUFLOW_TRACES",
        message=f"model.vllm.{field}: a task does not choose where traces go; leave it out: the worker sends its own "
        "(GPUFLOW_TRACES)",
    )
