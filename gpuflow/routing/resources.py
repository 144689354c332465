"""From the `resources` of a template, or of `@app.task(resources=...)`, to requirements.

Used by the app at submit. The shorthand (`accelerators`) and the long form (`hardware.gpu`) may both be
given only when they ask for the same. CPU, memory and labels hold for every alternative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.routing.accelerators import format_accelerators, parse_accelerators
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import cpus, gpu_memory_gb, host_memory_mib

_KNOWN: Final = frozenset({"accelerators", "hardware", "labels", "replicas"})
_KNOWN_HARDWARE: Final = frozenset({"cpu", "memory", "gpu"})
_KNOWN_GPU: Final = frozenset({"type", "count", "memory", "shared", "fraction"})


def requirement_from_resources(
    resources: Mapping[str, Any] | str | None, gpu_available: bool, *, strict: bool = True
) -> tuple[Requirement, ...]:
    """Return what the resources ask for, in order of preference (at least one requirement).

    A string is the shorthand. Without a word on GPUs: `hardware` with CPU or memory alone means no GPU,
    otherwise any GPU if the fleet has one (`gpu_available`), else cpu. `strict=False` passes over unknown
    fields, for templates whose schema warns of them. Raises InvalidTemplate, naming the field.
    """
    if isinstance(resources, str):
        resources = {"accelerators": resources}
    given = dict(resources or {})
    hardware = _mapping(given.get("hardware"), "hardware")
    if strict:
        _refuse_unknown(given, _KNOWN, "resources")
        _refuse_unknown(hardware, _KNOWN_HARDWARE, "resources.hardware")
    long_form = _long_form(hardware.get("gpu"), strict)
    alternatives: tuple[Requirement, ...] = ()
    if given.get("accelerators") not in (None, "", [], ()):
        alternatives = parse_accelerators(given["accelerators"])
        if long_form is not None and alternatives != (long_form,):
            raise InvalidTemplate(
                f"resources: accelerators {given['accelerators']!r} and hardware.gpu "
                f"({format_accelerators(long_form)}) ask for different GPUs; keep one of them"
            )
    elif long_form is not None:
        alternatives = (long_form,)
    elif hardware.get("cpu") is not None or hardware.get("memory") is not None:
        alternatives = (Requirement(),)
    else:
        alternatives = (Requirement(gpu_count=1 if gpu_available else 0),)
    common: dict[str, Any] = {
        "cpu": _amount(hardware.get("cpu"), cpus, "hardware.cpu", '8, 0.5 or "500m"'),
        "memory_mib": _amount(hardware.get("memory"), host_memory_mib, "hardware.memory", "32Gi or 32GB"),
        "labels": _labels(given.get("labels")),
    }
    return tuple(_checked(lambda ask=ask: replace(ask, **common)) for ask in alternatives)


def _long_form(gpu: object, strict: bool) -> Requirement | None:
    """Read `hardware.gpu`: type, count, memory. A share of a GPU is routed to where the whole fits."""
    if gpu is None:
        return None
    if isinstance(gpu, bool) or not isinstance(gpu, Mapping):
        raise InvalidTemplate(f"resources.hardware.gpu is {gpu!r}; write fields such as {{type: a100, count: 1}}")
    if strict:
        _refuse_unknown(gpu, _KNOWN_GPU, "resources.hardware.gpu")
    count = 1 if gpu.get("count") is None else gpu["count"]
    if isinstance(count, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", count):
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidTemplate(f"resources.hardware.gpu.count is {count!r}; give a count such as 1")
    if count == 0:
        return Requirement()
    shared = bool(gpu.get("shared")) or gpu.get("fraction") is not None
    if shared and count > 1:
        raise InvalidTemplate(f"resources.hardware.gpu: a share is of one GPU, but count is {count}; give 1")
    kinds = gpu.get("type")
    types = list(kinds) if isinstance(kinds, list | tuple) else [kinds] if kinds else []
    asks = [parse_accelerators(_typed(kind))[0] for kind in types]
    found = {ask.vram_gb_min for ask in asks}
    if len(found) > 1 or any(ask.gpu_count != 1 or ask.gpu_count_max for ask in asks):
        raise InvalidTemplate(
            f"resources.hardware.gpu.type is {kinds!r}; give names, and count and memory in their own fields"
        )
    of_type = found.pop() if found else None
    memory = _amount(gpu.get("memory"), gpu_memory_gb, "hardware.gpu.memory", "40GB or 40Gi")
    if memory is not None and of_type is not None and memory != of_type:
        raise InvalidTemplate(
            f"resources.hardware.gpu: type {kinds!r} and memory {gpu['memory']!r} contradict; keep one"
        )
    names = () if any(not ask.gpu_names for ask in asks) else tuple(n for ask in asks for n in ask.gpu_names)
    return _checked(lambda: Requirement(gpu_count=count, gpu_names=names, vram_gb_min=memory or of_type))


def _typed(kind: object) -> str:
    if not isinstance(kind, str) or ":" in kind:
        raise InvalidTemplate(f"resources.hardware.gpu.type is {kind!r}; give a name such as a100 or any")
    return kind


def _amount(value: object, read: Any, field: str, example: str) -> Any:
    if value is None:
        return None
    amount = None if isinstance(value, bool) else read(f"{value}".removesuffix("+"))
    if amount is None or amount <= 0:
        raise InvalidTemplate(f"resources.{field} is {value!r}; give an amount with its unit, such as {example}")
    return amount


def _labels(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, list | tuple):
        return tuple((str(tag), "") for tag in value)
    labels = _mapping(value, "labels")
    for key, glob in labels.items():
        if isinstance(glob, Mapping | list):
            raise InvalidTemplate(f"resources.labels.{key} is {glob!r}; give one glob such as us-*")
    return tuple((str(key), "" if glob is None else _label_text(glob)) for key, glob in labels.items())


def _label_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidTemplate(f"resources.{field} is {value!r}; give fields with names")
    return value


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise InvalidTemplate(f"{where} has an unknown field {key!r}; it knows {', '.join(sorted(known))}")


def _checked(build: Any) -> Requirement:
    try:
        requirement: Requirement = build()
    except InvalidTemplate:
        raise
    except GPUFlowError as error:
        raise InvalidTemplate(f"resources: {error}") from error
    return requirement
