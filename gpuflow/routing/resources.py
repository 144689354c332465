"""From the `resources` of a template, or of `@app.task(resources=...)`, to requirements.

Used by the app at submit. The shorthand (`accelerators`) and the long form (`hardware.gpu`) may both be
given only when they ask for the same GPUs; a share and a compute capability in the long form hold for every
alternative of the shorthand, as do CPU, memory, disk and labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.accelerators import format_accelerators, parse_accelerators
from gpuflow.routing.gpu_fields import GpuFields, checked, read_gpu
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import cpus, disk_gib, host_memory_mib

_KNOWN: Final = frozenset({"accelerators", "hardware", "labels", "replicas", "gpu"})
_KNOWN_HARDWARE: Final = frozenset({"cpu", "memory", "disk", "gpu"})
_NOTHING: Final[tuple[object, ...]] = (None, "", [], (), {})


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
    given = _one_place_for_gpu(dict(resources or {}))
    hardware = _mapping(given.get("hardware"), "hardware")
    if strict:
        _refuse_unknown(given, _KNOWN, "resources")
        _refuse_unknown(hardware, _KNOWN_HARDWARE, "resources.hardware")
    long_form = None if hardware.get("gpu") is None else read_gpu(hardware["gpu"], strict=strict)
    on_cpu = any(hardware.get(field) is not None for field in ("cpu", "memory", "disk"))
    alternatives: tuple[Requirement, ...]
    if given.get("accelerators") not in _NOTHING:
        alternatives = _both(given["accelerators"], long_form)
    elif long_form is not None:
        alternatives = (long_form.requirement(),)
    else:
        alternatives = (Requirement(gpu_count=1 if gpu_available and not on_cpu else 0),)
    common: dict[str, Any] = {
        "cpu": _amount(hardware.get("cpu"), cpus, "cpu", '8, 0.5 or "500m"'),
        "memory_mib": _amount(hardware.get("memory"), host_memory_mib, "memory", "32Gi or 32GB"),
        "disk_gib": _amount(hardware.get("disk"), disk_gib, "disk", "100Gi or 100GB"),
        "labels": _labels(given.get("labels")),
    }
    return tuple(checked(lambda ask=ask: replace(ask, **common)) for ask in alternatives)


def says_devices(resources: Mapping[str, Any] | None) -> bool:
    """Say whether the `resources` of a spec have a word on GPUs, be it that there are to be none."""
    given = resources if isinstance(resources, Mapping) else {}
    hardware = given.get("hardware")
    named = hardware.get("gpu") if isinstance(hardware, Mapping) else None
    return any(value not in _NOTHING for value in (given.get("accelerators"), given.get("gpu"), named))


def asks_gpus(resources: Mapping[str, Any] | str | list[str] | None) -> bool:
    """Whether what a task asks for is GPUs, by any of its alternatives. Raises InvalidTemplate, naming the field."""
    if not resources:
        return False
    asked = resources if isinstance(resources, Mapping) else {"accelerators": resources}
    return any(one.gpu_count for one in requirement_from_resources(asked, gpu_available=False))


def asks_gpus_alone(resources: Mapping[str, Any] | str | list[str] | None) -> bool:
    """Whether every alternative of what a task asks for is GPUs. Raises InvalidTemplate, naming the field."""
    if not resources:
        return False
    asked = resources if isinstance(resources, Mapping) else {"accelerators": resources}
    return all(one.gpu_count for one in requirement_from_resources(asked, gpu_available=False))


def format_resources(requirement: Requirement) -> dict[str, Any]:
    """Write a requirement as `resources`, in the shorthand as far as that goes; reading it gives the same back."""
    ask = requirement
    gpu: dict[str, Any] = {}
    if ask.gpu_shared:
        gpu["shared"] = True
    if ask.compute_capability_min is not None:
        gpu["compute_capability"] = f"{ask.compute_capability_min}+"
    hardware: dict[str, Any] = {
        "cpu": ask.cpu,
        "memory": None if ask.memory_mib is None else f"{ask.memory_mib}Mi",
        "disk": None if ask.disk_gib is None else f"{round(ask.disk_gib * 1024)}Mi",
        "gpu": gpu or None,
    }
    resources: dict[str, Any] = {
        "accelerators": format_accelerators(ask),
        "hardware": {field: value for field, value in hardware.items() if value is not None},
        "labels": dict(ask.labels),
    }
    return {field: value for field, value in resources.items() if value}


def _one_place_for_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """`resources.gpu`, as dstack spells it, is the shorthand when it is text and the long form when it has fields."""
    gpu = given.pop("gpu", None)
    if gpu is None:
        return given
    if not isinstance(gpu, Mapping):
        if given.get("accelerators") not in (*_NOTHING, gpu):
            raise InvalidTemplate(
                f"resources: gpu {gpu!r} and accelerators {given['accelerators']!r} are the same field; keep one"
            )
        return {**given, "accelerators": gpu}
    hardware = _mapping(given.get("hardware"), "hardware")
    if hardware.get("gpu") not in (None, gpu):
        raise InvalidTemplate("resources: gpu and hardware.gpu are the same field; keep one")
    return {**given, "hardware": {**hardware, "gpu": gpu}}


def _both(accelerators: object, long_form: GpuFields | None) -> tuple[Requirement, ...]:
    """Return the alternatives of the shorthand, under the conditions of the long form."""
    alternatives = parse_accelerators(accelerators)
    if long_form is None:
        return alternatives
    if long_form.names_gpus and alternatives != (long_form.base(),):
        raise InvalidTemplate(
            f"resources: accelerators {accelerators!r} and hardware.gpu "
            f"({format_accelerators(long_form.base())}) ask for different GPUs; keep one of them"
        )
    return tuple(checked(lambda ask=ask: long_form.conditions(ask)) for ask in alternatives)


def _amount(value: object, read: Any, field: str, example: str) -> Any:
    if value is None:
        return None
    amount = None if isinstance(value, bool) else read(f"{value}".removesuffix("+"))
    if amount is None or amount <= 0:
        raise InvalidTemplate(
            f"resources.hardware.{field} is {value!r}; give an amount with its unit, such as {example}"
        )
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
