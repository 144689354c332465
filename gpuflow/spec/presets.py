"""Where shipped configs live, and reading one by name.

Anyone may call it, executors too: it needs PyYAML and nothing else outside the standard library. A preset is a YAML
file in configs/<kind>/; the wheel carries that folder as gpuflow/_configs.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.spec.reading import Document, read_file

#: The kinds of presets, one folder each.
KINDS: Final = ("models", "datasets", "pipelines", "environments", "containers", "gpus", "scaling")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def configs_root() -> Path:
    """Return the folder of the shipped configs: gpuflow/_configs in a wheel, configs/ in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def list_presets(kind: str) -> list[str]:
    """Return the names of a kind, sorted. Raises GPUFlowError for an unknown kind."""
    if kind not in KINDS:
        raise GPUFlowError(f"no presets of kind {kind!r}; the kinds are {', '.join(KINDS)}")
    return sorted(path.stem for path in (configs_root() / kind).glob("*.yaml"))


def names_preset(identifier: object, kind: str = "models") -> bool:
    """Say whether a bare name is that of a preset. Ids of the hub have a `/`, and are not looked for."""
    return isinstance(identifier, str) and "/" not in identifier and identifier in list_presets(kind)


def preset_path(kind: str, name: str) -> Path:
    """Return the file of a preset. Raises GPUFlowError naming near matches."""
    names = list_presets(kind)
    if _NAME.fullmatch(name) and name in names:
        return configs_root() / kind / f"{name}.yaml"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    mend = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names) or 'none'}"
    raise GPUFlowError(f"no preset {name[:60]!r} in {kind}; {mend}")


def preset_document(kind: str, name: str) -> Document:
    """Return a preset with the lines of its values. Raises GPUFlowError."""
    path = preset_path(kind, name)
    return read_file(path, name=f"{kind}/{name}")


def load_preset(kind: str, name: str) -> dict[str, Any]:
    """Return a preset as a mapping. Raises GPUFlowError naming near matches, or its mistakes."""
    document = preset_document(kind, name)
    if not isinstance(document.data, dict):
        raise GPUFlowError(f"preset {kind}/{name} is not a mapping; write fields with names")
    return document.data
