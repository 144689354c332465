"""What a demand queue asks for, read from its name. Pure.

So a worker asks nobody about a queue that waits, and -Q may name one before anybody has submitted to it. The
requirement is stored beside a queue too, for names that were cut and for people.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import unquote

from gpuflow.errors import GPUFlowError
from gpuflow.routing.queue_names import MAX_NAME_LENGTH, queue_name
from gpuflow.routing.requirement import Requirement, is_gpu_name

_GLOBS: Final = str.maketrans({"+": "*", "~": "?"})
_HASH: Final = re.compile(r"-h[0-9a-f]{16}$")
_PART: Final = re.compile(
    r"(?P<vram_gb_min>\d+[gm])|shared(?P<shared>\d+[gm])|max(?P<vram_gb_max>\d+[gm])|share(?P<gpu_share>\d+m?)"
    r"|x(?P<gpu_count>\d+)(?:to(?P<gpu_count_max>\d+))?|cc(?P<major>\d+)(?P<minor>\d)|(?P<cpu>\d+m?)c"
    r"|ram(?P<memory_mib>\d+[gm])|disk(?P<disk_gib>\d+[gm])|(?P<gpu_names>[a-z+~][a-z0-9+~_]*)"
)


def requirement_of(name: str) -> Requirement | None:
    """Return the requirement whose queue has this name; None for a name that is none, or that was cut and hashed."""
    if len(name) > MAX_NAME_LENGTH:
        return None
    host, _, labels = name.partition(".")
    kind, *parts = host.split("-")
    if kind not in ("cpu", "gpu") or (len(name) >= MAX_NAME_LENGTH and _HASH.search(name)):
        return None
    fields: dict[str, Any] = {"gpu_count": 1 if kind == "gpu" else 0}
    for part in parts:
        found = _PART.fullmatch(part)
        if found is None:
            return None
        fields |= _fields({key: text for key, text in found.groupdict().items() if text is not None})
    fields["labels"] = tuple(_label(text) for text in labels.split(".")) if labels else ()
    try:
        requirement = Requirement(**fields)
    except GPUFlowError:
        return None
    return requirement if queue_name(requirement) == name else None


def _fields(found: dict[str, str]) -> dict[str, Any]:
    (key, text), *more = found.items()
    if key == "gpu_names":
        names = text.translate(_GLOBS).split("_")
        return {key: tuple(names)} if all(map(is_gpu_name, names)) else {}
    if key == "shared":
        return {"gpu_shared": True, "vram_gb_min": _gigabytes(text)}
    if key == "gpu_share":
        return {key: int(text[:-1]) / 1000 if text.endswith("m") else int(text) / 100}
    if key == "gpu_count":
        return {key: int(text), **{name: int(value) for name, value in more}}
    if key == "major":
        return {"compute_capability_min": f"{text}.{more[0][1]}"}
    if key == "cpu":
        return {key: int(text[:-1]) / 1000 if text.endswith("m") else float(text)}
    return {key: round(_gigabytes(text) * 1024) if key == "memory_mib" else _gigabytes(text)}


def _gigabytes(text: str) -> float:
    return int(text[:-1]) / (1 if text.endswith("g") else 1024)


def _label(text: str) -> tuple[str, str]:
    key, _, value = (unquote(part) for part in text.translate(_GLOBS).partition("="))
    return key, value
