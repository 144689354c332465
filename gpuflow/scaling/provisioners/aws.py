"""Machines that are EC2 instances, tagged with fleet, machine id and family.

A launch bears the machine's id as its client token, so a request that is sent again launches nothing more. Where one
kind of instance or one subnet has no capacity, the next one is tried. Lists are eventually consistent: an instance may
be listed only some time after its launch, and a client remembers the instances that it has launched itself.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gpuflow.scaling.provisioners import (
    COMMAND_MARK,
    FAMILY_LABEL,
    FLEET_LABEL,
    MACHINE_LABEL,
    MACHINE_MARK,
    AwsInstance,
    ProvisionerError,
    UnknownMachine,
    Wanted,
)

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound
    from botocore.parsers import ResponseParserError
except ImportError as error:
    raise ProvisionerError(f"aws: needs boto3 ({error.name} is missing); run pip install 'gpuflow[aws]'") from error

#: What a request may raise; the last one for what no AWS has written, such as the page of a proxy.
FAULTS: Final = (ClientError, BotoCoreError, ResponseParserError)
#: So many kinds and subnets are tried for one launch at most.
MOST_PLACES: Final = 24
#: Tries of one request, by boto3 itself, which waits between them where requests are throttled.
REQUEST_ATTEMPTS: Final = 5
#: An instance may be listed only so long after its launch, in seconds.
LISTED_WITHIN_SECONDS: Final = 120.0
#: Instances in these states are machines; those that shut down are not.
LIVE_STATES: Final = ("pending", "running", "stopping", "stopped")
#: Another kind of instance, or another subnet, may have what this one has not.
_NO_CAPACITY: Final = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "Unsupported",
        "VcpuLimitExceeded",
    }
)
_NOT_ALLOWED: Final = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnauthorizedOperation",
    }
)
#: So many machines that this client has launched or ended are remembered.
_REMEMBERED: Final = 10_000
_MOST_MESSAGE: Final = 300


class Ec2Machines:
    """EC2 instances of one region; `tag` names this fleet, `endpoint` another service that speaks EC2."""

    listed_within_seconds = LISTED_WITHIN_SECONDS

    def __init__(
        self, instance: AwsInstance, *, tag: str, timeout_seconds: float = 120.0, endpoint: str | None = None
    ) -> None:
        self._instance = instance
        self._tag = tag
        read_seconds = max(1.0, timeout_seconds / REQUEST_ATTEMPTS)
        config = Config(
            retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
            connect_timeout=min(10.0, read_seconds),
            read_timeout=read_seconds,
        )
        try:
            session = boto3.session.Session()
            self._client = session.client("ec2", region_name=instance.region, endpoint_url=endpoint, config=config)
        except ProfileNotFound as error:
            raise ProvisionerError(
                f"aws: EC2 in {instance.region} cannot be used: {error}; set AWS_PROFILE of beat to a profile that its "
                "AWS configuration has, or unset it"
            ) from None
        except (BotoCoreError, ValueError) as error:
            raise ProvisionerError(f"aws: EC2 in {instance.region} cannot be used: {error}") from None
        #: Machine id -> the instances that this client has launched for it; empty: it was ended.
        self._launched: dict[str, tuple[str, ...]] = {}

    def launch(self, wanted: Wanted) -> None:
        """Launch an instance, of the first kind and subnet that has capacity."""
        if wanted.id in self._launched or any(self._instances(MACHINE_LABEL, wanted.id, live_only=False)):
            return
        causes = []
        for number, (kind, subnet) in enumerate(self._places()):
            try:
                answer = self._client.run_instances(**self._request(wanted, number, kind, subnet))
            except FAULTS as error:
                if _code(error) not in _NO_CAPACITY:
                    raise self._error("launch", error) from None
                causes.append(" in ".join(filter(None, (kind, subnet))) + f": {_text(error)}")
                continue
            self._remember(wanted.id, tuple(one["InstanceId"] for one in answer["Instances"]))
            return
        raise ProvisionerError(f"aws: {self._instance.region} has no capacity: {'; '.join(causes)}")

    def terminate(self, machine_id: str) -> None:
        """Terminate every instance of a machine."""
        listed = (one["InstanceId"] for one in self._instances(MACHINE_LABEL, machine_id))
        found = sorted({*self._launched.get(machine_id, ()), *listed})
        if found:
            try:
                self._client.terminate_instances(InstanceIds=found)
            except FAULTS as error:
                if _code(error) != "InvalidInstanceID.NotFound":
                    raise self._error("terminate", error) from None
                self._terminate_each(found)
        self._remember(machine_id, ())

    def machines(self) -> dict[str, str]:
        """Return the machines of this fleet."""
        found = {}
        for one in self._instances(FLEET_LABEL, self._tag):
            tags = _tags(one)
            if MACHINE_LABEL in tags:
                found[tags[MACHINE_LABEL]] = tags.get(FAMILY_LABEL, "")
        return found

    def unknown(self) -> list[UnknownMachine]:
        """Return the instances of other fleets of this account and region."""
        found = []
        for one in self._describe([{"Name": "tag-key", "Values": [FLEET_LABEL]}, _states()]):
            tags, instance_id = _tags(one), str(one["InstanceId"])
            if tags.get(FLEET_LABEL) != self._tag:
                found.append(
                    UnknownMachine(
                        id=tags.get(MACHINE_LABEL, instance_id),
                        family=tags.get(FAMILY_LABEL, ""),
                        fleet=tags.get(FLEET_LABEL, ""),
                        region=self._instance.region,
                        instance=instance_id,
                    )
                )
        return found

    def _places(self) -> Iterator[tuple[str, str]]:
        """Return what is tried, in this order: each type in every subnet; empty: that of the launch template."""
        places = itertools.product(self._instance.types or ("",), self._instance.subnets or ("",))
        yield from itertools.islice(places, MOST_PLACES)

    def _request(self, wanted: Wanted, number: int, kind: str, subnet: str) -> dict[str, Any]:
        """Return the request; the client token differs for each place, as one token means one request."""
        asked = self._instance
        tags = {FLEET_LABEL: self._tag, MACHINE_LABEL: wanted.id, FAMILY_LABEL: wanted.family, "Name": wanted.id}
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        request: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": wanted.id if not number else f"{wanted.id}.{number}",
            "TagSpecifications": [{"ResourceType": what, "Tags": listed} for what in ("instance", "volume")],
            "InstanceInitiatedShutdownBehavior": "terminate",
        }
        if asked.launch_template:
            named = "LaunchTemplateId" if asked.launch_template.startswith("lt-") else "LaunchTemplateName"
            request["LaunchTemplate"] = {named: asked.launch_template, "Version": asked.launch_template_version}
        else:
            request["MetadataOptions"] = {"HttpTokens": "required"}
        if wanted.spot:
            request["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        given = {
            "ImageId": asked.image,
            "InstanceType": kind,
            "SubnetId": subnet,
            "SecurityGroupIds": list(asked.security_groups),
            "IamInstanceProfile": {"Name": asked.instance_profile} if asked.instance_profile else None,
            "KeyName": asked.key_name,
            "UserData": user_data(asked.user_data, wanted),
        }
        return request | {name: value for name, value in given.items() if value}

    def _instances(self, tag: str, value: str, *, live_only: bool = True) -> Iterator[Mapping[str, Any]]:
        """Return the instances of this fleet with a tag."""
        asked = {FLEET_LABEL: self._tag, tag: value}
        filters: list[Mapping[str, Any]] = [{"Name": f"tag:{key}", "Values": [wanted]} for key, wanted in asked.items()]
        return self._describe([*filters, _states()] if live_only else filters)

    def _describe(self, filters: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        try:
            for page in self._client.get_paginator("describe_instances").paginate(Filters=filters):
                for reservation in page["Reservations"]:
                    yield from reservation["Instances"]
        except FAULTS as error:
            raise self._error("list", error) from None

    def _terminate_each(self, instance_ids: Iterable[str]) -> None:
        """Terminate one by one where one of them has gone, which fails the request for all."""
        for instance_id in instance_ids:
            try:
                self._client.terminate_instances(InstanceIds=[instance_id])
            except FAULTS as error:
                if _code(error) != "InvalidInstanceID.NotFound":
                    raise self._error("terminate", error) from None

    def _remember(self, machine_id: str, instance_ids: tuple[str, ...]) -> None:
        self._launched[machine_id] = instance_ids
        while len(self._launched) > _REMEMBERED:
            del self._launched[next(iter(self._launched))]

    def _error(self, action: str, error: Exception) -> ProvisionerError:
        code = _code(error)
        if code in _NOT_ALLOWED or isinstance(error, NoCredentialsError):
            cause = f"AWS refuses the credentials of beat ({code or 'none were found'}); check them and their policy"
        else:
            cause = _text(error)
        return ProvisionerError(f"aws: {action} in {self._instance.region} failed: {cause}")


def user_data(text: str, wanted: Wanted) -> str:
    """Return the script that an instance runs at its start: the marks are replaced.

    A token of the worker's own, made at the launch and void at the end, belongs into this command's environment.
    """
    spot = ("--spot-notices", "aws") if wanted.spot else ()
    command = ["celery", "-A", "gpuflow", "worker", "--name", wanted.id, *spot, *wanted.worker_options]
    return text.replace(COMMAND_MARK, shlex.join(command)).replace(MACHINE_MARK, wanted.id)


def _states() -> dict[str, Any]:
    return {"Name": "instance-state-name", "Values": list(LIVE_STATES)}


def _tags(instance: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in instance.get("Tags") or ()}


def _code(error: Exception) -> str:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def _text(error: Exception) -> str:
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message", ""))
        return f"{_code(error)}: {message[:_MOST_MESSAGE]}"
    return f"{type(error).__name__}: {error}"[:_MOST_MESSAGE]
