"""The names of demand queues: readable, stable across versions, safe for `-Q`. And which of them `-Q` covers.

A name is `cpu` or `gpu`, then, where asked for and in this order:

    -a100            the GPU's name; several are joined by `_`; in a glob, `*` is spelled `+` and `?` `~`
    -80g  -20480m    at least this memory on the box of each GPU, in GB or MiB
    -shared8g        instead: this memory of a GPU that others may share
    -max80g          at most this memory
    -share50         half of a GPU: a share in percent, or in thousandths (-share125m)
    -x4  -x1to4      count, or range of counts; one GPU is not written
    -cc80            at least this compute capability (8.0)
    -8c  -500mc      CPUs, or thousandths of one
    -ram32g -ram500m memory of the machine, in GiB or MiB
    -disk100g        free disk, in GiB or MiB
    .team=nlp        a label, sorted by name; `.fast` for a label that need only be there; `*` and `?` as
                     above, and every other character outside A-Z a-z 0-9 _ : @ - as %XX

So a name without labels never holds a dot, and different requirements have different names: a name tells
all (`routing.queue_parsing`). Past MAX_NAME_LENGTH the end is replaced by `-h` and a hash; then the
requirement that is stored beside the queue tells.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from gpuflow.routing.requirement import Requirement

#: Longest queue name; a longer one is cut and hashed.
MAX_NAME_LENGTH: Final = 120
#: Hexadecimal digits of the hash: 64 bits.
_HASH_DIGITS: Final = 16
_GLOB_SPELLING: Final = str.maketrans({"*": "+", "?": "~"})
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_:@*?-]")


def queue_name(requirement: Requirement) -> str:
    """Return the name of the queue that carries this requirement."""
    ask = requirement
    parts = ["gpu" if ask.gpu_count else "cpu"]
    if ask.gpu_names:
        parts.append("_".join(ask.gpu_names).translate(_GLOB_SPELLING))
    if ask.vram_gb_min is not None:
        parts.append(("shared" if ask.gpu_shared else "") + _gigabytes(ask.vram_gb_min))
    if ask.vram_gb_max is not None:
        parts.append("max" + _gigabytes(ask.vram_gb_max))
    if ask.gpu_share is not None:
        percent, rest = divmod(round(ask.gpu_share * 1000), 10)
        parts.append(f"share{percent * 10 + rest}m" if rest else f"share{percent}")
    if ask.gpu_count_max is not None:
        parts.append(f"x{ask.gpu_count}to{ask.gpu_count_max}")
    elif ask.gpu_count > 1:
        parts.append(f"x{ask.gpu_count}")
    if ask.compute_capability_min is not None:
        parts.append("cc" + ask.compute_capability_min.replace(".", ""))
    if ask.cpu is not None:
        parts.append(f"{ask.cpu:.0f}c" if ask.cpu == int(ask.cpu) else f"{ask.cpu * 1000:.0f}mc")
    if ask.memory_mib is not None:
        exact = ask.memory_mib % 1024 == 0
        parts.append(f"ram{ask.memory_mib // 1024}g" if exact else f"ram{ask.memory_mib}m")
    if ask.disk_gib is not None:
        parts.append("disk" + _gigabytes(ask.disk_gib))
    name = "-".join(parts) + "".join(
        f".{_safe(key)}={_safe(value)}" if value else f".{_safe(key)}" for key, value in ask.labels
    )
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: MAX_NAME_LENGTH - _HASH_DIGITS - 2]}-h{digest}"


def is_demand_queue(name: str) -> bool:
    """Whether a name (of a queue, or given to `-Q`) means demand queues and no plain Celery queue."""
    return family_matches(name, "cpu") or family_matches(name, "gpu")


def family_matches(name: str, family: str) -> bool:
    """Whether `-Q family` covers the queue: itself and its refinements, which continue with `-` or `.`.

    `gpu-a100` covers gpu-a100-80g-x4 and gpu-a100.team=nlp, not gpu-a1000, and not the wider gpu-a100+ or
    gpu.
    """
    return name == family or (name.startswith(family) and name[len(family)] in "-.")


def _gigabytes(value: float) -> str:
    return f"{value:.0f}g" if value == int(value) else f"{value * 1024:.0f}m"


def _safe(text: str) -> str:
    quoted = _UNSAFE.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), text
    )
    return quoted.translate(_GLOB_SPELLING)
