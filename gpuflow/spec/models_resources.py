"""What a task asks of a machine. The tokens of `accelerators` are read by gpuflow.routing; here only their letters."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from gpuflow.spec.models_types import Cpus, Flag, Memory, Name, Number, OneOrMany, Strict, Text, Whole
from gpuflow.spec.report import show

_TOKEN: Final = re.compile(r"[A-Za-z0-9*?:+._ -]{1,64}")


def _tokens(value: Any) -> Any:
    for token in value if isinstance(value, list) else [value]:
        if not isinstance(token, str) or not _TOKEN.fullmatch(token.strip()) or not token.strip():
            raise ValueError(
                f"{show(token)} is no ask for accelerators; write as A100-80GB:2, 40GB+:1 or RTX4090, or a list of such"
            )
    if value == []:
        raise ValueError("is an empty list; name at least one accelerator, or leave the field out")
    return value


class GpuAsk(Strict):
    """The long form of an ask for GPUs."""

    type: OneOrMany | None = Field(None, description="Name or glob (`a100*`), a list of them, or any")
    count: Whole | None = Field(None, ge=0, le=1024, description="GPUs; 0 keeps the task off GPUs")
    memory: Memory | None = Field(None, description="Memory of each GPU, the size on the box, such as 40Gi")
    shared: Flag | None = Field(None, description="A share of one GPU is enough")
    fraction: Number | None = Field(None, gt=0, le=1, description="Share of one GPU's memory, 0 to 1")

    @model_validator(mode="after")
    def _one_gpu_for_a_share(self) -> GpuAsk:
        if (self.shared or self.fraction is not None) and (self.count or 1) > 1:
            raise ValueError(f"a share is of one GPU, but count is {self.count}; give count 1, or no share")
        return self


class Hardware(Strict):
    """CPUs, memory and GPUs in the long form."""

    cpu: Cpus | None = Field(None, description="CPUs: 8, 0.5 or 500m")
    memory: Memory | None = Field(None, description="Memory of the machine, with its unit: 32Gi")
    gpu: GpuAsk | None = None


class Resources(Strict):
    """Everything that a task asks of a machine."""

    accelerators: Annotated[Any, BeforeValidator(_tokens)] | None = Field(
        None, description="Shorthand, or a list of them in order of preference"
    )
    hardware: Hardware | None = None
    labels: dict[Name, Text] | None = Field(None, description="Worker label -> glob")
    replicas: Whole | None = Field(None, ge=1, le=1024, description="Copies of the task")
