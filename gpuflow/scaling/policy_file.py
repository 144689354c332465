"""Reads the policy of scaling: a YAML file, a preset of configs/scaling, or the settings alone.

The settings ELASTIC_AUTO_* are the defaults of the knobs, a file may set each of them anew and adds kinds of machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from gpuflow.errors import GPUFlowError, InvalidSettings
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.catalogue import identify
from gpuflow.routing.units import gpu_memory_gb, host_memory_mib
from gpuflow.scaling.model import Family, Policy
from gpuflow.scaling.provisioners import COMMAND_MARK, AwsInstance, ContainerImage
from gpuflow.scaling.worker_options import read_worker_options
from gpuflow.settings import Settings
from gpuflow.settings.model import MOST_COST
from gpuflow.spec.presets import list_presets, preset_path
from gpuflow.spec.reading import read_file
from gpuflow.spec.units import duration_seconds

KIND: Final = "scaling"
_SETTING: Final = "GPUFLOW_SCALING_POLICY"
_INSTANCE_TYPE: Final = r"^[a-z0-9-]+\.[a-z0-9-]+$"
#: EC2 takes 16 KiB of user data; the worker's command needs some of it.
_MOST_USER_DATA: Final = 14_000
_NAME: Final = r"^[a-z0-9][a-z0-9-]{0,39}$"


def _amount(read: Callable[[str], Any], example: str) -> BeforeValidator:
    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = read(value)
        if found is None:
            raise ValueError(f"is not an amount; give one such as {example}")
        return found

    return BeforeValidator(convert)


Duration = Annotated[float, BeforeValidator(duration_seconds), Field(ge=0, le=366 * 86_400)]
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MachineCost = Annotated[float, Field(ge=0, le=MOST_COST, allow_inf_nan=False)]
GpuMemory = Annotated[float, _amount(gpu_memory_gb, "80GB"), Field(gt=0, le=100_000)]
HostMemory = Annotated[int, _amount(host_memory_mib, "64GiB"), Field(gt=0, le=2**40)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=False)


class _Gpu(_Model):
    name: str = Field(min_length=1, max_length=100)
    memory: GpuMemory
    count: int = Field(default=1, ge=1, le=1024)


class _Capability(_Model):
    gpus: tuple[_Gpu, ...] = ()
    cpus: float = Field(default=1, gt=0, le=100_000)
    memory: HostMemory = 1024
    disk: HostMemory | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class _Instance(_Model):
    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")
    launch_template: str = Field(default="", max_length=128)
    launch_template_version: str = Field(default="$Default", max_length=20)
    image: str = Field(default="", pattern=r"^(ami-[0-9a-f]+)?$")
    types: tuple[Annotated[str, Field(pattern=_INSTANCE_TYPE)], ...] = Field(default=(), max_length=50)
    subnets: tuple[Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")], ...] = Field(default=(), max_length=50)
    security_groups: tuple[Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")], ...] = ()
    instance_profile: str = Field(default="", max_length=128)
    key_name: str = Field(default="", max_length=255)
    user_data: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> _Instance:
        if not self.launch_template and not (self.image and self.types and self.user_data):
            raise ValueError("give a launchTemplate, or image, types and userData")
        return self


class _Container(_Model):
    image: str = Field(min_length=1, max_length=500, pattern=r"^[^-\s]\S*$")
    engine: Literal["docker", "podman"] = "docker"
    options: tuple[str, ...] = ()
    environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()


class _Provisioner(_Model):
    kind: Literal["local", "command", "aws", "container"]
    command: tuple[str, ...] = ()
    instance: _Instance | None = None
    container: _Container | None = None
    timeout: Duration = 120.0

    @model_validator(mode="after")
    def _has_its_own(self) -> _Provisioner:
        if (self.kind == "command") != bool(self.command):
            raise ValueError("a provisioner of kind command has a `command`, one of another kind has none")
        if (self.kind == "aws") != (self.instance is not None):
            raise ValueError("a provisioner of kind aws has an `instance`, one of another kind has none")
        if (self.kind == "container") != (self.container is not None):
            raise ValueError("a provisioner of kind container has a `container`, one of another kind has none")
        if self.kind == "aws" and find_spec("boto3") is None:
            raise ValueError("kind aws needs boto3; run pip install 'gpuflow[aws]'")
        return self


class _Family(_Model):
    name: str = Field(pattern=_NAME)
    provisioner: _Provisioner
    capability: _Capability | None = None
    min: int = Field(default=0, ge=0, le=10_000)
    max: int = Field(ge=0, le=10_000)
    target_backlog: Duration = 300.0
    idle: Duration | None = None
    launch_deadline: Duration = 300.0
    cost_per_hour: MachineCost = 0.0
    spot_cost_per_hour: MachineCost | None = None
    spot_share: float = Field(default=0.0, ge=0, le=1)
    max_jobs: int | None = Field(default=None, ge=1, le=1024)
    scale_to_zero: bool = True
    worker_options: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_possible(self) -> _Family:
        if self.least > self.max:
            raise ValueError(f"min is {self.least}, above max ({self.max}); raise max or lower min")
        if self.provisioner.kind != "local" and self.capability is None:
            raise ValueError("capability is missing: say what a machine of this family has")
        options = read_worker_options(self.worker_options)
        if options.gpus is not None and self.capability is None:
            raise ValueError("workerOptions has --gpus: say with `capability` what a worker has with these GPUs")
        if options.max_jobs is not None and self.max_jobs is not None:
            raise ValueError("maxJobs is given twice; take --max-jobs out of workerOptions")
        return self

    @property
    def least(self) -> int:
        return self.min if self.scale_to_zero else max(1, self.min)


class _File(_Model):
    schema_: Literal[1] = Field(alias="schema")
    description: str = ""
    idle: Duration | None = None
    enable_threshold: int | None = Field(default=None, ge=0)
    disable_queue_max: int | None = Field(default=None, ge=0)
    min_active_workers: int | None = Field(default=None, ge=0)
    cooldown: Duration | None = None
    target_backlog: Duration | None = None
    budget_per_hour: Cost | None = None
    families: tuple[_Family, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> _File:
        names = [family.name for family in self.families]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two families are called {twice[0]!r}; give each a name of its own")
        return self


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How the machines of a family come to be: by `command`, as EC2 `instance`, as `container`, else as processes."""

    family: str
    command: tuple[str, ...] = ()
    instance: AwsInstance | None = None
    container: ContainerImage | None = None
    timeout_seconds: float = 120.0
    deadline_seconds: float = 300.0
    worker_options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A policy, and how each of its families is launched."""

    policy: Policy
    launching: tuple[Launching, ...] = ()


def load_policy(settings: Settings, here: Callable[[], Capability]) -> LoadedPolicy:
    """Read the policy that GPUFLOW_SCALING_POLICY names. `here` tells what this machine has.

    Raises InvalidSettings naming the file, the place in it, the cause and the way out.
    """
    policy = Policy(
        idle_seconds=settings.elastic_auto_disable_idle_seconds,
        enable_threshold=settings.elastic_auto_enable_queue_threshold,
        disable_queue_max=settings.elastic_auto_disable_queue_max,
        min_active=settings.elastic_auto_min_active_workers,
        cooldown_seconds=settings.elastic_auto_toggle_cooldown_seconds,
    )
    if not settings.scaling_policy:
        return LoadedPolicy(policy=policy)
    path = _path_of(settings.scaling_policy)
    found = _read(path)
    launching = tuple(_launching(family, path) for family in found.families)
    return LoadedPolicy(policy=_merged(policy, found, here), launching=launching)


def _path_of(given: str) -> Path:
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if "/" not in given and given in list_presets(KIND):
        return preset_path(KIND, given)
    raise InvalidSettings(
        f"{_SETTING} is {given!r}: there is no such file, and no such preset; give the path of a policy, "
        f"or one of {', '.join(list_presets(KIND))}"
    )


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(read_file(path, name=str(path)).data)
    except ValidationError as error:
        raise InvalidSettings("\n".join(f"{path}: {text}" for text in _mistakes(error))) from None
    except (GPUFlowError, OSError) as error:
        raise InvalidSettings(f"{_SETTING}: {path} cannot be read: {error}") from None


def _mistakes(error: ValidationError) -> Iterable[str]:
    for mistake in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, mistake["loc"])) or "the policy"
        yield f"{place}: {mistake['msg'].removeprefix('Value error, ')}; see docs/howto/scale-a-fleet.md"


def _merged(policy: Policy, found: _File, here: Callable[[], Capability]) -> Policy:
    knobs = {
        "idle_seconds": found.idle,
        "enable_threshold": found.enable_threshold,
        "disable_queue_max": found.disable_queue_max,
        "min_active": found.min_active_workers,
        "cooldown_seconds": found.cooldown,
        "target_backlog_seconds": found.target_backlog,
        "budget_per_hour": found.budget_per_hour,
    }
    given: dict[str, Any] = {name: value for name, value in knobs.items() if value is not None}
    policy = replace(policy, **given, families=tuple(_family(family, here) for family in found.families))
    if policy.disable_queue_max > policy.enable_threshold:
        raise InvalidSettings(
            f"disableQueueMax ({policy.disable_queue_max}) must not be above enableThreshold "
            f"({policy.enable_threshold}), or workers would switch on and off for ever; lower the first"
        )
    return policy


def _family(family: _Family, here: Callable[[], Capability]) -> Family:
    options = read_worker_options(family.worker_options)
    capability = _capability(family) if family.capability is not None else here()
    return Family(
        name=family.name,
        capability=replace(capability, labels=tuple(sorted(dict(capability.labels + options.labels).items()))),
        least=family.least,
        most=family.max,
        target_backlog_seconds=family.target_backlog,
        idle_seconds=family.idle,
        cost_per_hour=family.cost_per_hour,
        spot_cost_per_hour=family.spot_cost_per_hour,
        spot_share=family.spot_share,
        slots=family.max_jobs or options.max_jobs,
        families=options.families,
        plain_queues=options.plain_queues,
    )


def _capability(family: _Family) -> Capability:
    declared = family.capability
    assert declared is not None  # noqa: S101  (asked for by the caller alone)
    gpus: list[GpuCapability] = []
    for gpu in declared.gpus:
        kind = identify(gpu.name, math.floor(gpu.memory * 1024))
        for _ in range(gpu.count):
            number = len(gpus)
            gpus.append(
                GpuCapability(
                    uuid=f"GPU-{number}",
                    index=number,
                    names=kind.names,
                    vram_gb=gpu.memory,
                    total_mib=math.floor(gpu.memory * 1024),
                )
            )
    return Capability(
        gpus=tuple(gpus),
        cpu_count=declared.cpus,
        memory_mib=declared.memory,
        labels=tuple(sorted(declared.labels.items())),
        disk_free_mib=declared.disk,
    )


def _aws_instance(family: _Family, policy: Path) -> AwsInstance | None:
    """Return what is launched, with the text of its user data, whose path is relative to the policy's folder."""
    given = family.provisioner.instance
    if given is None:
        return None
    text = _user_data(given.user_data, policy) if given.user_data else ""
    return AwsInstance(**{**given.model_dump(), "user_data": text})


def _user_data(name: str, policy: Path) -> str:
    path = policy.parent / Path(name).expanduser()
    try:
        content = path.read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{policy}: userData {path} cannot be read: {error}") from None
    if COMMAND_MARK not in text or len(content) > _MOST_USER_DATA:
        raise InvalidSettings(
            f"{policy}: userData {path} must hold {COMMAND_MARK}, in whose place the worker's command comes, "
            f"and have at most {_MOST_USER_DATA} bytes"
        )
    return text


def _launching(family: _Family, policy: Path) -> Launching:
    options, container = list(family.worker_options), family.provisioner.container
    if family.max_jobs is not None:
        options += ["--max-jobs", str(family.max_jobs)]
    for key, value in sorted((family.capability.labels if family.capability is not None else {}).items()):
        options += ["--label", f"{key}={value}"]
    if family.cost_per_hour:
        options += ["--cost", f"{family.cost_per_hour:g}"]
    return Launching(
        family=family.name,
        command=family.provisioner.command,
        instance=_aws_instance(family, policy),
        container=ContainerImage(**container.model_dump()) if container is not None else None,
        timeout_seconds=family.provisioner.timeout,
        deadline_seconds=family.launch_deadline,
        worker_options=tuple(options),
    )
