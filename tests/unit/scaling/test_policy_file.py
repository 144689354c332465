"""Policies of scaling as operators write them: what is read, and what is refused with its place and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.errors import InvalidSettings
from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.fitting import Place, fits, places
from gpuflow.scaling.model import Demand
from gpuflow.scaling.policy_file import LoadedPolicy, load_policy
from gpuflow.settings import Settings

HERE = Capability(cpu_count=3, memory_mib=1000)


def load(tmp_path: Path, text: str, **settings: object) -> LoadedPolicy:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return load_policy(Settings(scaling_policy=str(path), **settings), lambda: HERE)  # type: ignore[arg-type]


FULL = """
schema: 1
budgetPerHour: 40
minActiveWorkers: 0
idle: 5m
families:
  - name: a100
    provisioner: {kind: command, command: [/bin/machines], timeout: 90s}
    capability:
      gpus: [{name: A100, memory: 80GB, count: 4}]
      cpus: 48
      memory: 400GiB
      labels: {zone: a}
    max: 8
    scaleToZero: false
    targetBacklog: 10m
    costPerHour: 12
    spotCostPerHour: 4
    spotShare: 0.5
    maxJobs: 4
    workerOptions: [-Q, gpu]
"""


def test_a_whole_policy(tmp_path: Path) -> None:
    loaded = load(tmp_path, FULL, elastic_auto_enable_queue_threshold=7)
    policy, family, launching = loaded.policy, loaded.policy.families[0], loaded.launching[0]
    assert (policy.budget_per_hour, policy.min_active, policy.idle_seconds, policy.enable_threshold) == (40, 0, 300, 7)
    assert (family.least, family.most, family.target_backlog_seconds) == (1, 8, 600)
    assert (family.cost(spot=False), family.cost(spot=True)) == (12, 4)
    four = Requirement(gpu_count=2, gpu_names=("a100",), vram_gb_min=80, labels=(("zone", "a"),))
    assert fits(four, family.capability) and places(four, family.capability) == 2
    assert not fits(Requirement(gpu_count=1, gpu_names=("h100",)), family.capability)
    assert launching.command == ("/bin/machines",) and launching.timeout_seconds == 90
    assert launching.worker_options == ("-Q", "gpu", "--max-jobs", "4", "--label", "zone=a", "--cost", "12")


AWS = """
schema: 1
families:
  - name: a10
    provisioner:
      kind: aws
      instance:
        {region: eu-west-1, image: ami-12ab, types: [g5.xlarge, g6.xlarge], subnets: [subnet-1a], userData: run.sh}
    capability: {gpus: [{name: A10G, memory: 24GB}], cpus: 4, memory: 16GiB}
    max: 4
"""


def test_instances_of_aws(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n@WORKER_COMMAND@\n")
    instance = load(tmp_path, AWS).launching[0].instance
    assert instance is not None and instance.types == ("g5.xlarge", "g6.xlarge")
    assert instance.user_data == script.read_text()
    script.write_text("#!/bin/sh\ntrue\n")
    with pytest.raises(InvalidSettings, match="must hold @WORKER_COMMAND@"):
        load(tmp_path, AWS)
    script.unlink()
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load(tmp_path, AWS)
    for old, new, cause in (
        ("eu-west-1", "somewhere", "region"),
        ("g5.xlarge", "'g5;xlarge'", "types.0"),
        ("image: ami-12ab, ", "", "give a launchTemplate, or image"),
        ("kind: aws", "kind: local", "kind aws has an `instance`"),
    ):
        with pytest.raises(InvalidSettings, match=cause):
            load(tmp_path, AWS.replace(old, new))


def test_the_settings_alone(tmp_path: Path) -> None:
    loaded = load_policy(Settings(), lambda: HERE)
    assert loaded.policy.families == () and loaded.policy.min_active == 1


def test_the_shipped_preset_is_this_machine() -> None:
    loaded = load_policy(Settings(scaling_policy="local"), lambda: HERE)
    assert [family.capability for family in loaded.policy.families] == [HERE]


def options(text: str, more: str = "") -> str:
    also = f", {more}" if more else ""
    return f"schema: 1\nfamilies: [{{name: a, provisioner: {{kind: local}}, max: 1, workerOptions: [{text}]{also}}}]"


def test_what_the_options_of_its_workers_say_is_known_of_a_family(tmp_path: Path) -> None:
    text = options('-Q, "gpu-a100,cpu,mail", --label, zone=b, --max-jobs=3, -c, "8"')
    (family,) = load(tmp_path, text).policy.families
    assert (family.families, family.plain_queues) == (("gpu-a100", "cpu"), ("mail",))
    assert family.capability.labels == (("zone", "b"),) and family.slots == 3
    place = Place.of_family(family, 1)
    assert place.serves(Demand(queue="cpu", requirement=Requirement()))
    assert not place.serves(Demand(queue="cpu.team=a", requirement=Requirement(labels=(("team", "a"),))))
    assert place.serves(Demand(queue="mail")) and not place.serves(Demand(queue="tasks"))
    (family,) = load(tmp_path, options("-Q, mail")).policy.families
    assert not Place.of_family(family, 1).serves(Demand(queue="cpu", requirement=Requirement()))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("schema: 2", "schema: Input should be 1"),
        ("- a", "policy"),
        ("schema: 1\nwords: 3", "words: Extra inputs"),
        ("schema: 1\nfamilies: [{name: A, provisioner: {kind: local}, max: 1}]", r"families.0.name"),
        ("schema: 1\nfamilies: [{name: a, provisioner: {kind: local}, max: 1, min: 2}]", "above max"),
        ("schema: 1\nfamilies: [{name: a, provisioner: {kind: local}, max: 1, costPerHour: 1.0e7}]", "costPerHour"),
        ("schema: 1\nfamilies: [{name: a, provisioner: {kind: local}, max: 0, scaleToZero: false}]", "above max"),
        ("schema: 1\nfamilies: [{name: a, provisioner: {kind: command}, max: 1}]", "has a `command`"),
        (
            "schema: 1\nfamilies: [{name: a, provisioner: {kind: command, command: [x]}, max: 1}]",
            "capability is missing",
        ),
        (
            "schema: 1\nfamilies: [{name: a, provisioner: {kind: container}, capability: {}, max: 1}]",
            "kind container has a `container`",
        ),
        (
            "schema: 1\nfamilies: [{name: a, provisioner: {kind: container, container: {image: --privileged}}, "
            "capability: {}, max: 1}]",
            "container.image",
        ),
        ("schema: 1\nfamilies: [{name: a, provisioner: {kind: magic}, max: 1}]", "provisioner.kind"),
        (
            "schema: 1\nfamilies: [{name: a, provisioner: {kind: local}, max: 1}, "
            "{name: a, provisioner: {kind: local}, max: 1}]",
            "two families are called 'a'",
        ),
        ("schema: 1\nidle: soon", "idle"),
        ("schema: 1\nbudgetPerHour: .nan", "budgetPerHour"),
        ("schema: 1\ndisableQueueMax: 9", "must not be above enableThreshold"),
        ("schema: [", "policy.yaml"),
        (options("--executors, echo"), "cannot have; which task types"),
        (options("-X, celery"), "name with -Q"),
        (options("--name, x"), "name of its worker"),
        (options("--no-such-option"), "cannot be read: No such option"),
        (options("-Q"), "cannot be read"),
        (options("gpu"), "of no option"),
        (options("--label, fast"), "not of the form key=value"),
        (options('--max-jobs, "0"'), "a count from 1 up"),
        (options('--gpus, "0"'), "say with `capability`"),
        (options('--max-jobs, "2"', "maxJobs: 2"), "given twice"),
    ],
)
def test_mistakes_are_named(text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=cause) as caught:
        load(tmp_path, text)
    assert "scaling" in str(caught.value) or "policy" in str(caught.value) or "enableThreshold" in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InvalidSettings, match=r"GPUFLOW_SCALING_POLICY is 'nowhere.yaml'.*one of local"):
        load_policy(Settings(scaling_policy="nowhere.yaml"), lambda: HERE)
