"""Checks how many processes a training asks for against the GPUs that it asks for. Used by `checking` alone.

The tokens of `accelerators` are read by gpuflow.routing. Here only their counts matter, which are the bare numbers
among them; what is not understood is left to the child, which knows the GPUs that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow.spec.report import Findings

#: `2` and `1..4`; the larger number counts.
_COUNT: Final = re.compile(r"(?:[0-9]{1,4}\s*\.\.\s*)?([0-9]{1,4})")


def check_ranks(spec: Mapping[str, Any], findings: Findings) -> None:
    """Note a `training.nproc_per_node` that the task can never have, and GPUs that it will not use."""
    training = spec.get("training")
    if isinstance(training, Mapping) and training.get("allow_multi_gpu") is False:
        taken = most_gpus(spec.get("resources")) or 0
        if taken > 1:
            findings.warn(
                ("training", "allow_multi_gpu"), f"is false: the task takes {taken} GPUs and trains on one; ask for one"
            )
    asked = training.get("nproc_per_node") if isinstance(training, Mapping) else None
    if not isinstance(training, Mapping) or not isinstance(asked, int) or asked <= 1:
        return
    path = ("training", "nproc_per_node")
    if training.get("allow_multi_gpu") is False:
        findings.add(path, f"is {asked}, but allow_multi_gpu is false; keep one of both")
        return
    most = most_gpus(spec.get("resources"))
    if most and asked > most:
        findings.add(
            path,
            f"is {asked}, but resources asks for at most {most} GPU{'s' if most > 1 else ''}; ask for {asked} GPUs, or "
            "leave it out: it is the number of GPUs then",
        )


def most_gpus(resources: Any) -> int | None:
    """Return the largest number of GPUs that `resources` may give; 0 for none at all, None where it does not say."""
    if not isinstance(resources, Mapping):
        return None
    given = resources.get("accelerators")
    if given not in (None, "", [], {}):
        counts = [_count(text) for text in _texts(given)]
        return None if None in counts else max((count for count in counts if count is not None), default=None)
    hardware = resources.get("hardware")
    gpu = hardware.get("gpu") if isinstance(hardware, Mapping) else None
    if not isinstance(gpu, Mapping):
        return None
    found = _COUNT.fullmatch(str(gpu.get("count", 1)).strip())
    return int(found[1]) if found else None


def _texts(given: Any) -> Iterator[str]:
    for entry in given if isinstance(given, list) else [given]:
        if isinstance(entry, Mapping):
            yield from (f"{name}:{count}" for name, count in entry.items())
        else:
            yield str(entry)


def _count(text: str) -> int | None:
    if "${" in text:
        return None
    if text.strip().lower() == "cpu":
        return 0
    tokens = [token.strip() for token in text.split(":")]
    counts = [int(found[1]) for token in tokens if (found := _COUNT.fullmatch(token))]
    return counts[0] if counts else 1
