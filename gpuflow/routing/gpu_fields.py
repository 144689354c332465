"""The long form of an ask for GPUs: `hardware.gpu` with its fields. Used by `gpuflow.routing.resources` alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.routing.accelerators import count_range, parse_accelerators, refuse_many
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import MemoryRange, gpu_memory_range

_WHERE: Final = "resources.hardware.gpu"
#: Other spellings of a field.
_ALIASES: Final = {"gpu_memory_fraction": "fraction", "name": "type"}
_KNOWN: Final = ("type", "count", "memory", "shared", "fraction", "compute_capability")
_COMPUTE: Final = re.compile(r"(?:>=\s*)?([0-9]{1,2}(?:\.[0-9])?)\+?")


@dataclass(frozen=True, kw_only=True)
class GpuFields:
    """What `hardware.gpu` says. `memory` is of the GPU, or with `shared` of the share."""

    count: int
    count_max: int | None
    names: tuple[str, ...]
    memory: MemoryRange
    shared: bool | None
    fraction: float | None
    compute_capability: str | None
    #: Whether it says which GPUs, not only under which conditions.
    names_gpus: bool

    def base(self) -> Requirement:
        """Return which GPUs are asked for, whole ones."""
        return checked(
            lambda: Requirement(
                gpu_count=self.count,
                gpu_count_max=self.count_max,
                gpu_names=self.names,
                vram_gb_min=self.memory.minimum,
                vram_gb_max=self.memory.maximum,
            )
        )

    def conditions(self, ask: Requirement) -> Requirement:
        """Return the ask with the share and the compute capability; an ask for no GPU stays as it is."""
        if not ask.gpu_count:
            return ask
        both = ask.gpu_share is not None and self.fraction is not None
        if both and abs((ask.gpu_share or 0) - (self.fraction or 0)) >= 0.001:
            raise InvalidTemplate(
                f"{_WHERE}.fraction is {self.fraction:g}, but accelerators asks for {ask.gpu_share:g} of a GPU; "
                "keep one"
            )
        fraction = ask.gpu_share if self.fraction is None else self.fraction
        if self.shared is False and fraction is not None:
            raise InvalidTemplate(f"{_WHERE}: shared is false, but {fraction:g} of a GPU is asked for; keep one")
        if self.shared and fraction is not None and ask.vram_gb_min is not None:
            raise InvalidTemplate(
                f"{_WHERE}: with shared, memory is the size of the share, and so is fraction ({fraction:g}); keep one"
            )
        return replace(
            ask,
            gpu_share=fraction,
            gpu_shared=bool(self.shared) and fraction is None,
            compute_capability_min=self.compute_capability,
        )

    def requirement(self) -> Requirement:
        """Return what is asked for."""
        return checked(lambda: self.conditions(self.base()))


def read_gpu(gpu: object, *, strict: bool) -> GpuFields:
    """Read the fields. `strict` refuses unknown ones. Raises InvalidTemplate, naming the field."""
    if isinstance(gpu, bool) or not isinstance(gpu, Mapping):
        raise InvalidTemplate(f"{_WHERE} is {gpu!r}; write fields such as {{type: a100, count: 1}}")
    fields = _one_spelling(gpu, strict=strict)
    count, count_max = _count(fields.get("count"))
    names, of_type = _names(fields.get("type"))
    memory = _memory(fields.get("memory"))
    if memory is not None and of_type is not None and (memory.minimum, memory.maximum) != (of_type, None):
        raise InvalidTemplate(f"{_WHERE}: type {fields['type']!r} and memory {fields['memory']!r} contradict; keep one")
    shared = fields.get("shared")
    if shared is not None and not isinstance(shared, bool):
        raise InvalidTemplate(f"{_WHERE}.shared is {shared!r}; it is true or false")
    if count == 0:
        names, of_type, memory = (), None, None
    return GpuFields(
        count=count,
        count_max=count_max,
        names=names,
        memory=memory or MemoryRange(minimum=of_type),
        shared=shared,
        fraction=_fraction(fields.get("fraction")),
        compute_capability=_compute(fields.get("compute_capability")),
        names_gpus=any(fields.get(field) is not None for field in ("type", "count", "memory")),
    )


def _one_spelling(gpu: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in gpu.items():
        name = _ALIASES.get(key, key)
        if strict and name not in _KNOWN:
            raise InvalidTemplate(f"{_WHERE} has an unknown field {key!r}; it knows {', '.join(sorted(_KNOWN))}")
        if value is not None and fields.setdefault(name, value) != value:
            raise InvalidTemplate(f"{_WHERE}: {key} {value!r} and {name} {fields[name]!r} are the same field; keep one")
    return fields


def _count(value: object) -> tuple[int, int | None]:
    if value is None:
        return 1, None
    found = None if isinstance(value, bool) or not isinstance(value, int | str) else count_range(str(value))
    if found is None:
        raise InvalidTemplate(f"{_WHERE}.count is {value!r}; give a count such as 1, or 1..4")
    return found


def _names(kinds: object) -> tuple[tuple[str, ...], float | None]:
    """Return the names of `type`, and the memory that stands in them."""
    types = list(kinds) if isinstance(kinds, list | tuple) else [kinds] if kinds else []
    refuse_many(len(types), f"{_WHERE}.type")  # before they are read
    asks = [parse_accelerators(_typed(kind))[0] for kind in types]
    found = {ask.vram_gb_min for ask in asks}
    plain = all(ask.gpu_count == 1 and not ask.gpu_count_max and not ask.shares for ask in asks)
    if len(found) > 1 or not plain or any(ask.vram_gb_max is not None for ask in asks):
        raise InvalidTemplate(f"{_WHERE}.type is {kinds!r}; give names, and count and memory in their own fields")
    names = () if any(not ask.gpu_names for ask in asks) else tuple(name for ask in asks for name in ask.gpu_names)
    refuse_many(len(names), f"{_WHERE}.type")
    return names, found.pop() if found else None


def _typed(kind: object) -> str:
    if not isinstance(kind, str) or ":" in kind:
        raise InvalidTemplate(f"{_WHERE}.type is {kind!r}; give a name such as a100 or any")
    return kind


def _memory(value: object) -> MemoryRange | None:
    if value is None:
        return None
    found = None if isinstance(value, bool) else gpu_memory_range(f"{value}")
    if found is None or found.minimum == 0 or found.maximum == 0:
        raise InvalidTemplate(
            f"{_WHERE}.memory is {value!r}; give an amount with its unit, such as 40GB, 40Gi or 24GB..80GB"
        )
    return found


def _fraction(value: object) -> float | None:
    if value is None:
        return None
    number = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = None
    if number is None or not 0 < number <= 1:
        raise InvalidTemplate(
            f"{_WHERE}.fraction is {value!r}; give a share of one GPU's memory, above 0 and at most 1"
        )
    return None if number == 1 else number


def _compute(value: object) -> str | None:
    if value is None:
        return None
    found = None if isinstance(value, bool) else _COMPUTE.fullmatch(str(value).strip())
    if found is None or found[1].startswith("0"):
        raise InvalidTemplate(f'{_WHERE}.compute_capability is {value!r}; give the least one, such as "8.0" or "8.0+"')
    return found[1]


def checked(build: Any) -> Requirement:
    """Return the requirement that `build` makes; one that contradicts itself is InvalidTemplate."""
    try:
        requirement: Requirement = build()
    except InvalidTemplate:
        raise
    except GPUFlowError as error:
        raise InvalidTemplate(f"resources: {error}") from error
    return requirement
