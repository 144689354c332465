"""What a task asks of a machine. The tokens of `accelerators` are read by gpuflow.routing; here only their letters."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from gpuflow.spec.models_types import Cpus, Flag, Memory, Name, Number, OneOrMany, Strict, Text, Whole
from gpuflow.spec.report import show
from gpuflow.spec.units import memory_mib

_TOKEN: Final = re.compile(r"[A-Za-z0-9*?|:+._ -]{1,256}")
_COUNT: Final = re.compile(r"\s*[0-9]{1,4}\.\.[0-9]{1,4}\s*")
_COMPUTE: Final = re.compile(r"\s*(?:>=\s*)?[1-9][0-9]?(?:\.[0-9])?\+?\s*")
_MAX_ALTERNATIVES: Final = 64


def _accelerators(value: Any) -> Any:
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if isinstance(entry, dict) and entry:
            for name, count in entry.items():
                _token(name)
                _token(count)
        else:
            _token(entry)
    if not entries:
        raise ValueError("is an empty list; name at least one accelerator, or leave the field out")
    if len(entries) > _MAX_ALTERNATIVES:
        raise ValueError(f"has {len(entries)} alternatives; keep at most {_MAX_ALTERNATIVES}")
    return value


def _token(value: Any) -> None:
    text = "" if isinstance(value, bool) or not isinstance(value, str | int | float) else str(value)
    if not text.strip() or not _TOKEN.fullmatch(text.strip()):
        raise ValueError(
            f"{show(value)} is no ask for accelerators; write as A100-80GB:2, 40GB+:1 or RTX4090, a list of such, "
            "or names with counts {A100: 2}"
        )


def _count(value: Any) -> Any:
    """A count, or a range of counts as text."""
    if isinstance(value, str) and _COUNT.fullmatch(value):
        return value.strip()
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 9:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1024:
        raise ValueError(f"is {show(value)}; it must be at least 0 and at most 1024, or a range such as 1..4")
    return value


def _memory_range(value: Any) -> Any:
    """Memory of a GPU: an amount, or a range."""
    text = value.strip().removesuffix("+") if isinstance(value, str) else value
    low, dots, high = text.partition("..") if isinstance(text, str) else (text, "", "")
    if dots and low.strip() and low.strip().replace(".", "", 1).isdecimal():
        low += high.strip().lstrip("0123456789. ")
    bounds = [part for part in (low, high) if part.strip()] if dots else [text]
    try:
        amounts = [memory_mib(part) for part in bounds]
    except ValueError as error:
        raise ValueError(f"{show(value)} {error}") from None
    if not amounts or min(amounts) <= 0 or max(amounts) >= 2**40:
        raise ValueError(f"{show(value)} is out of range; give an amount such as 40GB, or a range such as 24GB..80GB")
    return value


def _compute(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not _COMPUTE.fullmatch(str(value)):
        raise ValueError(f'is {show(value)}; it must be the least compute capability, such as "8.0"')
    return str(value)


Accelerators = Annotated[Any, BeforeValidator(_accelerators)]


class GpuAsk(Strict):
    """The long form of an ask for GPUs."""

    type: OneOrMany | None = Field(
        None,
        validation_alias=AliasChoices("type", "name"),
        description="Name or glob (`a100*`), a list of them, or any",
    )
    count: Annotated[Any, BeforeValidator(_count)] | None = Field(
        None, description="GPUs: 2, or a range 1..4; 0 keeps the task off GPUs"
    )
    memory: Annotated[Any, BeforeValidator(_memory_range)] | None = Field(
        None,
        description="Memory of each GPU (the size on the box): 40Gi, 24GB..80GB; with `shared`, of the share",
    )
    compute_capability: Annotated[Any, BeforeValidator(_compute)] | None = Field(
        None, description='The least CUDA compute capability, such as "8.0"'
    )
    shared: Flag | None = Field(None, description="A share of one GPU, of the size of `memory`, is enough")
    fraction: Number | None = Field(
        None,
        gt=0,
        le=1,
        validation_alias=AliasChoices("fraction", "gpu_memory_fraction"),
        description="Share of one GPU's memory, 0 to 1; also `gpu_memory_fraction`",
    )

    @model_validator(mode="after")
    def _one_gpu_for_a_share(self) -> GpuAsk:
        share = self.shared or (self.fraction is not None and self.fraction < 1)
        if share and self.count not in (None, 1):
            raise ValueError(f"a share is of one GPU, but count is {self.count}; give count 1, or no share")
        if self.shared is False and self.fraction is not None and self.fraction < 1:
            raise ValueError(f"shared is false, but fraction is {self.fraction:g}; keep one")
        if self.shared and self.fraction is not None and self.memory is not None:
            raise ValueError(
                f"with shared, memory ({self.memory}) is the size of the share, and so is fraction "
                f"({self.fraction:g}); keep one"
            )
        return self


class Hardware(Strict):
    """CPUs, memory, disk and GPUs in the long form."""

    cpu: Cpus | None = Field(None, description="CPUs: 8, 0.5 or 500m")
    memory: Memory | None = Field(None, description="Memory of the machine, with its unit: 32Gi")
    disk: Memory | None = Field(None, description="Free disk where results are written, with its unit: 100Gi")
    gpu: GpuAsk | None = None


class Resources(Strict):
    """Everything that a task asks of a machine."""

    accelerators: Accelerators | None = Field(
        None, description="Shorthand, names with counts, or a list of them in order of preference"
    )
    hardware: Hardware | None = None
    labels: dict[Name, Text] | None = Field(None, description="Worker label -> glob")
    replicas: Whole | None = Field(
        None, ge=1, le=1024, description="Tasks that share the rows of data, as parallel.max_shards"
    )

    @model_validator(mode="before")
    @classmethod
    def _gpu_is_the_shorthand(cls, value: Any) -> Any:
        """`gpu: A100:80GB:2`, as dstack spells it, is `accelerators`."""
        if not isinstance(value, dict) or value.get("gpu") is None or isinstance(value["gpu"], dict):
            return value
        rest = {key: item for key, item in value.items() if key != "gpu"}
        if rest.get("accelerators") not in (None, value["gpu"]):
            raise ValueError(f"gpu {show(value['gpu'])} and accelerators are the same field; keep one")
        return {**rest, "accelerators": value["gpu"]}
