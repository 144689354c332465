"""EC2 instances as machines, over real HTTP: what is asked for, lost answers, no capacity, throttling, refusals."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from gpuflow.scaling.provisioners import ProvisionerError, UnknownMachine, Wanted
from tests.support.ec2 import INSTANCE, Ec2Server

WANTED = Wanted(id="gpu-1", family="gpu", worker_options=("--label", "zone=a b"))


def test_a_launch_bears_token_tags_and_the_command_of_its_worker(ec2: Ec2Server) -> None:
    instance = replace(INSTANCE, security_groups=("sg-1a2b",), instance_profile="", key_name="ours")
    ec2.answer = lambda request: "Unsupported" if request["Action"] == "RunInstances" else None
    with pytest.raises(ProvisionerError, match="no capacity"):
        ec2.machines("gpuflow-a", instance).launch(replace(WANTED, spot=True))
    sent = ec2.sent("RunInstances")[0]
    assert sent["ClientToken"] == "gpu-1" and sent["InstanceMarketOptions.MarketType"] == "spot"
    assert sent["InstanceInitiatedShutdownBehavior"] == "terminate" and sent["MetadataOptions.HttpTokens"] == "required"
    assert sent["SecurityGroupId.1"] == "sg-1a2b" and sent["KeyName"] == "ours"
    tags = {sent[f"TagSpecification.1.Tag.{n}.Key"]: sent[f"TagSpecification.1.Tag.{n}.Value"] for n in range(1, 5)}
    assert tags == {"gpuflow-fleet": "gpuflow-a", "gpuflow-machine": "gpu-1", "gpuflow-family": "gpu", "Name": "gpu-1"}
    script = base64.b64decode(sent["UserData"]).decode()
    assert "celery -A gpuflow worker --name gpu-1 --spot-notices aws --label 'zone=a b'" in script


def test_a_lost_answer_launches_nothing_more(ec2: Ec2Server) -> None:
    cut = iter(["cut"])
    ec2.answer = lambda request: next(cut, None) if request["Action"] == "RunInstances" else None
    ec2.machines("gpuflow").launch(WANTED)
    assert len(ec2.sent("RunInstances")) == 2
    ec2.machines("gpuflow").launch(WANTED)
    assert len(ec2.sent("RunInstances")) == 2, "it is there"
    # Another beat, for which it is not listed yet, launches the same one
    other = ec2.machines("gpuflow")
    other._describe = lambda filters: iter(())  # type: ignore[method-assign]
    other.launch(WANTED)
    assert len(ec2.sent("RunInstances")) == 3 and len(_instance_ids(ec2)) == 1


def test_where_one_type_or_subnet_has_no_capacity_the_next_is_tried(ec2: Ec2Server) -> None:
    full = {"g5.xlarge": "InsufficientInstanceCapacity"}
    ec2.answer = lambda request: full.get(request.get("InstanceType", ""))
    machines = ec2.machines("gpuflow")
    machines.launch(WANTED)
    first, second = ec2.sent("RunInstances")
    assert (first["InstanceType"], second["InstanceType"]) == ("g5.xlarge", "g6.xlarge")
    assert first["ClientToken"] != second["ClientToken"], "one token means one request"
    assert machines.machines() == {"gpu-1": "gpu"}
    full["g6.xlarge"] = "SpotMaxPriceTooLow"
    with pytest.raises(ProvisionerError, match=r"no capacity: g5\.xlarge: Insufficient.*g6\.xlarge: Spot"):
        machines.launch(replace(WANTED, id="gpu-2"))


def test_throttled_requests_are_sent_again(ec2: Ec2Server) -> None:
    busy = iter(["RequestLimitExceeded", "RequestLimitExceeded"])
    ec2.answer = lambda request: next(busy, None)
    assert ec2.machines("gpuflow").machines() == {}
    assert len(ec2.requests) == 3


def test_refused_credentials_are_named_and_other_places_are_not_tried(ec2: Ec2Server) -> None:
    ec2.answer = lambda request: "UnauthorizedOperation" if request["Action"] == "RunInstances" else None
    with pytest.raises(ProvisionerError, match=r"refuses the credentials of beat \(UnauthorizedOperation\)"):
        ec2.machines("gpuflow").launch(WANTED)
    assert len(ec2.sent("RunInstances")) == 1


def test_the_page_of_a_proxy_is_a_failure_like_any_other(ec2: Ec2Server) -> None:
    ec2.answer = lambda request: "page"
    with pytest.raises(ProvisionerError, match=r"aws: list in eu-west-1 failed: ResponseParserError"):
        ec2.machines("gpuflow").machines()


def test_no_credentials_at_all(ec2: Ec2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ProvisionerError, match="none were found"):
        ec2.machines("gpuflow").machines()


def test_a_profile_that_is_not_there_is_named_with_what_mends_it(
    ec2: Ec2Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "ours")
    with pytest.raises(ProvisionerError, match=r"profile \(ours\) could not be found; set AWS_PROFILE of beat"):
        ec2.machines("gpuflow")


def test_an_instance_that_is_not_listed_yet_is_ended_by_who_launched_it(ec2: Ec2Server) -> None:
    machines = ec2.machines("gpuflow")
    machines.launch(WANTED)
    listed = machines._describe
    machines._describe = lambda filters: iter(())  # type: ignore[method-assign]
    machines.terminate("gpu-1")
    machines._describe = listed  # type: ignore[method-assign]
    assert machines.machines() == {}


def test_one_that_has_gone_does_not_keep_the_other_instances_of_a_machine(ec2: Ec2Server) -> None:
    machines = ec2.machines("gpuflow")
    machines.launch(WANTED)
    machines._launched["gpu-1"] = ("i-0123456789abcdef0", *machines._launched["gpu-1"])
    machines.terminate("gpu-1")
    assert ec2.machines("gpuflow").machines() == {}
    assert len(ec2.sent("TerminateInstances")) == 3


def test_many_machines_are_listed_page_by_page(ec2: Ec2Server) -> None:
    machines = ec2.machines("gpuflow")
    for number in range(7):
        machines.launch(Wanted(id=f"gpu-{number}", family="gpu"))
    make = machines._client.get_paginator

    class Small:
        def paginate(self, **asked: object) -> object:
            return make("describe_instances").paginate(**asked, PaginationConfig={"PageSize": 5})

    machines._client.get_paginator = lambda name: Small()
    ec2.requests.clear()
    assert len(machines.machines()) == 7
    assert len(ec2.sent("DescribeInstances")) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"region": "eu-west-1; reboot", "instance": "i-12"},
        {"region": "eu-west-1", "instance": "i-12 $(reboot)"},
        {"pid": 7, "host": "a; reboot"},
        {"pid": 1, "host": "a"},
        {},
    ],
)
def test_no_command_is_made_of_what_somebody_else_has_written(fields: dict[str, Any]) -> None:
    assert UnknownMachine(id="x", **fields).end_command() == ""


def test_two_fleets_of_one_account_leave_each_other_alone(ec2: Ec2Server) -> None:
    first, second = ec2.machines("gpuflow-a"), ec2.machines("gpuflow-b")
    first.launch(WANTED)
    assert second.machines() == {}
    second.terminate("gpu-1")
    assert first.machines() == {"gpu-1": "gpu"}
    (seen,) = second.unknown()
    (instance_id,) = _instance_ids(ec2)
    assert (seen.id, seen.fleet) == ("gpu-1", "gpuflow-a")
    assert seen.end_command() == f"aws ec2 terminate-instances --region eu-west-1 --instance-ids {instance_id}"
    assert first.unknown() == []


def _instance_ids(ec2: Ec2Server) -> list[str]:
    reservations = ec2.machines("x")._client.describe_instances()["Reservations"]
    return [one["InstanceId"] for reservation in reservations for one in reservation["Instances"]]
