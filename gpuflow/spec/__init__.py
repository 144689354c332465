"""Templates: what a user may ask for. One schema for YAML, JSON, Python and HTTP.

Anyone above `routing` may import the public names from here. They are loaded on first use, so that a child process can
take `gpuflow.spec.presets` or `gpuflow.spec.references` without pydantic. Nothing here knows brokers or workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Mistake": "gpuflow.spec.report",
    "Reference": "gpuflow.spec.references",
    "Stage": "gpuflow.spec.template",
    "TaskSpec": "gpuflow.spec.models_task",
    "Template": "gpuflow.spec.template",
    "canonical": "gpuflow.spec.checking",
    "configs_root": "gpuflow.spec.presets",
    "duration_seconds": "gpuflow.spec.units",
    "expand_matrix": "gpuflow.spec.matrix",
    "list_presets": "gpuflow.spec.presets",
    "load_preset": "gpuflow.spec.presets",
    "memory_mib": "gpuflow.spec.units",
    "parse": "gpuflow.spec.parsing",
    "parse_text": "gpuflow.spec.parsing",
    "pick": "gpuflow.spec.references",
    "resolve": "gpuflow.spec.references",
    "resolve_env": "gpuflow.spec.references",
    "set_path": "gpuflow.spec.matrix",
    "shard": "gpuflow.spec.sharding",
    "shard_count": "gpuflow.spec.sharding",
}

__all__ = [
    "Mistake",
    "Reference",
    "Stage",
    "TaskSpec",
    "Template",
    "canonical",
    "configs_root",
    "duration_seconds",
    "expand_matrix",
    "list_presets",
    "load_preset",
    "memory_mib",
    "parse",
    "parse_text",
    "pick",
    "resolve",
    "resolve_env",
    "set_path",
    "shard",
    "shard_count",
]

if TYPE_CHECKING:
    from gpuflow.spec.checking import canonical
    from gpuflow.spec.matrix import expand_matrix, set_path
    from gpuflow.spec.models_task import TaskSpec
    from gpuflow.spec.parsing import parse, parse_text
    from gpuflow.spec.presets import configs_root, list_presets, load_preset
    from gpuflow.spec.references import Reference, pick, resolve, resolve_env
    from gpuflow.spec.report import Mistake
    from gpuflow.spec.sharding import shard, shard_count
    from gpuflow.spec.template import Stage, Template
    from gpuflow.spec.units import duration_seconds, memory_mib


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gpuflow.spec' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
