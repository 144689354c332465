"""How machines come to be and go: one interface, the provisioners behind it, and which one a family has.

Every provisioner passes tests/conformance/test_provisioners.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpuflow.errors import GPUFlowError

if TYPE_CHECKING:
    from gpuflow.scaling.policy_file import Launching
    from gpuflow.settings import Settings

#: Placeholders of user data: the command that starts the worker, and the machine's id.
COMMAND_MARK: Final = "@WORKER_COMMAND@"
MACHINE_MARK: Final = "@MACHINE_ID@"
#: Tags and labels of machines.
FLEET_LABEL: Final = "gpuflow-fleet"
MACHINE_LABEL: Final = "gpuflow-machine"
FAMILY_LABEL: Final = "gpuflow-family"
ENGINES: Final = ("docker", "podman")
_CONTAINER: Final = re.compile(r"[0-9a-f]{12,64}")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]")
_INSTANCE: Final = re.compile(r"i-[0-9a-f]{1,40}")
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")


class ProvisionerError(GPUFlowError):
    """A machine could not be launched, terminated or listed."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A machine to launch. Its worker must be started with `--name <id>` and these further options.

    `id` is the idempotency token: launched twice, there is one machine.
    """

    id: str
    family: str
    spot: bool = False
    worker_options: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        options = list(self.worker_options)
        return {"id": self.id, "family": self.family, "spot": self.spot, "workerOptions": options}


@dataclass(frozen=True, kw_only=True)
class UnknownMachine:
    """A machine of gpuflow that bears the tag of another fleet, or of an earlier broker of this one; nobody ends it.

    `host` and `pid` are those of a process of some machine, `host`, `engine` and `container` those of a container,
    `region` and `instance` those of an EC2 instance.
    """

    id: str
    family: str = ""
    fleet: str = ""
    host: str = ""
    pid: int = 0
    region: str = ""
    instance: str = ""
    engine: str = ""
    container: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UnknownMachine:
        """Read what was kept, of a newer version too. Raises ValueError, TypeError, AttributeError."""
        known = {one.name: data.get(one.name, one.default) for one in fields(cls) if one.name != "id"}
        texts = {name: str(value) for name, value in known.items() if name != "pid"}
        return cls(id=str(data.get("id", "")), pid=int(known["pid"]), **texts)

    def end_command(self) -> str:
        """Return what an operator types to end it; made of checked parts, since others may have written them."""
        if _REGION.fullmatch(self.region) and _INSTANCE.fullmatch(self.instance):
            return f"aws ec2 terminate-instances --region {self.region} --instance-ids {self.instance}"
        if self.engine in ENGINES and _CONTAINER.fullmatch(self.container) and _HOST.fullmatch(self.host):
            return f"{self.engine} stop {self.container}  # on {self.host}"
        if self.pid > 1 and _HOST.fullmatch(self.host):
            return f"kill {self.pid}  # on {self.host}"
        return ""


@dataclass(frozen=True, kw_only=True)
class AwsInstance:
    """What is launched: a launch template, or an image with its types, or both; in the first subnet with capacity.

    `user_data` is the text of a script, with the marks above; empty: that of the launch template.
    """

    region: str
    launch_template: str = ""
    launch_template_version: str = "$Default"
    image: str = ""
    types: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    instance_profile: str = ""
    key_name: str = ""
    user_data: str = ""


@dataclass(frozen=True, kw_only=True)
class ContainerImage:
    """What is started by a container engine: an image with gpuflow in it.

    `options` are further ones of the engine's `run`, `environment` the names of variables of beat that are passed on.
    """

    image: str
    engine: str = "docker"
    options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


class Provisioner(Protocol):
    """Launches and terminates machines, and finds those that bear the tag of this fleet.

    Each call raises ProvisionerError, and may be repeated. After a launch that raised, the machine may be there or not.
    A machine is listed `listed_within_seconds` after its launch at the latest.
    """

    listed_within_seconds: float

    def launch(self, wanted: Wanted) -> None:
        """Launch a machine; nothing, if one of this id is there, or was terminated."""

    def terminate(self, machine_id: str) -> None:
        """End a machine and all that runs on it; nothing, if there is none."""

    def machines(self) -> dict[str, str]:
        """Return the machines of this fleet that are there or coming: id -> family."""

    def unknown(self) -> Sequence[UnknownMachine]:
        """Return machines of gpuflow that it sees and that do not bear the tag of this fleet."""


def provisioner_of(
    launching: Launching, settings: Settings, url: str, tag: str, *, recorded: Iterable[str] = ()
) -> Provisioner:
    """Return the provisioner of a family; `url` is the address of the broker, `tag` that of the fleet's machines.

    `recorded` are the ids of the machines that the broker knows of this fleet.
    """
    if launching.instance is not None:
        from gpuflow.scaling.provisioners.aws import Ec2Machines

        return Ec2Machines(launching.instance, tag=tag, timeout_seconds=launching.timeout_seconds)
    if launching.container is not None:
        from gpuflow.scaling.provisioners.containers import Containers

        return Containers(launching.container, settings, url, tag, timeout_seconds=launching.timeout_seconds)
    from gpuflow.scaling.provisioners.command import CommandProvisioner
    from gpuflow.scaling.provisioners.local import LocalProcesses

    if launching.command:
        return CommandProvisioner(launching.command, tag=tag, timeout_seconds=launching.timeout_seconds)
    return LocalProcesses(settings, url, tag, recorded=recorded)
