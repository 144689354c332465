"""LoRA adapters of a request: which folders, and a digest that changes with their content. Imports no ML library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.base import bad_input
from executors.modeling.location import adapter_folder
from gpuflow.protocol import Request


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter: its folder, its share in the sum, and what tells it from any other, an older one in it included."""

    path: Path
    weight: float
    digest: str


def adapters_of(request: Request) -> tuple[Adapter, ...]:
    """Return the adapters of a request, that of its checkpoint first. Raises ExecutorError: BadInput."""
    found = []
    base = adapter_folder(request.checkpoint_path) if request.checkpoint_path else None
    if base is not None:
        found.append(_adapter(base, 1.0))
    for given in (request.spec.get("model") or {}).get("adapters") or ():
        if not given.get("path"):
            raise bad_input("an adapter of model.adapters has no path; give the folder of a LoRA adapter")
        folder = adapter_folder(given["path"])
        if folder is None:
            raise bad_input(f"{given['path']} holds no LoRA adapter: there is no adapter_config.json in it")
        weight = given.get("weight")
        found.append(_adapter(folder, 1.0 if weight is None else float(weight)))
    return tuple(found)


def _adapter(folder: Path, weight: float) -> Adapter:
    return Adapter(path=folder, weight=weight, digest=digest(folder))


def digest(folder: Path) -> str:
    """Return a digest of where an adapter is and of the names, sizes and times of its files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([str(folder.resolve()), facts]).encode()).hexdigest()[:16]


def rank(adapter: Adapter) -> int:
    """Return the rank of an adapter, the largest of its layers. Raises ExecutorError: BadInput."""
    try:
        config: Mapping[str, Any] = json.loads((adapter.path / "adapter_config.json").read_text("utf-8"))
        return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 1)
    except (ValueError, TypeError, KeyError) as error:
        raise bad_input(f"{adapter.path}/adapter_config.json is not that of a LoRA adapter: {error}") from error
