"""A spot instance that is taken away: its worker drains within the notice, its work goes on elsewhere, it is ended."""

from __future__ import annotations

from gpuflow.client import submit
from gpuflow.routing.capability import Capability
from gpuflow.scaling.autoscaler import Autoscaler
from gpuflow.scaling.model import Family, Policy
from gpuflow.scaling.policy_file import Launching, LoadedPolicy
from gpuflow.scaling.provisioners import Wanted
from gpuflow.scaling.store import ScalingStore
from tests.support.ec2 import INSTANCE, Ec2Server, ec2, ec2_server  # noqa: F401  (two fixtures)
from tests.support.fleet import TestFleet
from tests.support.metadata import metadata_service
from tests.support.waiting import eventually, patient


def test_a_notice_drains_the_work_goes_on_elsewhere_and_the_instance_goes(
    fleet: TestFleet,
    ec2: Ec2Server,  # noqa: F811
) -> None:
    # Given an instance that was launched for a task, with its worker
    here = Capability(cpu_count=64, memory_mib=1 << 20, disk_free_mib=1 << 30)
    policy = Policy(min_active=0, families=(Family(name="box", capability=here, most=1, spot_share=1.0),))
    launching = Launching(family="box", instance=INSTANCE)
    scaler = Autoscaler(
        fleet.app, LoadedPolicy(policy=policy, launching=(launching,)), lambda one, tag: ec2.machines(tag), name="a"
    )
    assert scaler._leader.lead()
    spec = fleet.echo(steps=2, checkpoint_steps=2, until_exists=str(fleet.folder / "never"))
    task = submit({**spec, "retry": {"max_attempts": 1}}, app=fleet.app)
    scaler.round()
    (machine,) = ScalingStore(fleet.app.redis, fleet.app.keys).machines()
    assert machine.spot and ec2.sent("RunInstances")[-1]["InstanceMarketOptions.MarketType"] == "spot"
    brief = {"GPUFLOW_NOTICE_SEC": "3"}
    with metadata_service() as service:
        leaves = fleet.start_worker(
            machine.id, "--spot-notices", "aws", env={**brief, "GPUFLOW_SPOT_METADATA_URL": service.url}
        )
        eventually(lambda: (record := task.record()).state == "RUNNING" and bool(record.progress), what="its progress")
        scaler.round()
        # When the provider announces its end
        service.announce(5)
        assert leaves.process.wait(timeout=patient(30)) == 0
    # Then the attempt was saved and does not count
    (first,) = fleet.app.ledger.attempts(task.id)
    assert first.outcome == "preempted" and fleet.state(task.id) == "QUEUED"
    assert "spot notice: terminate" in leaves.log()
    # And the instance goes
    scaler.round()
    assert machine.id not in ec2.machines(scaler._tag).machines()
    # And another worker goes on from there
    fleet.start_worker("stays")
    assert task.get(timeout=patient(120))["resumed_from_step"] == 2
    assert task.record().attempt == 2


def test_an_instance_that_no_record_knows_is_ended_and_that_of_another_fleet_is_not(
    fleet: TestFleet,
    ec2: Ec2Server,  # noqa: F811
) -> None:
    loaded = LoadedPolicy(policy=Policy(min_active=0), launching=(Launching(family="box", instance=INSTANCE),))
    scaler = Autoscaler(fleet.app, loaded, lambda one, tag: ec2.machines(tag), name="a")
    assert scaler._leader.lead()
    scaler.round()
    ours, theirs = ec2.machines(scaler._tag), ec2.machines("gpuflow-0123456789abcdef")
    ours.launch(Wanted(id="box-lost", family="box"))
    theirs.launch(Wanted(id="box-theirs", family="box"))
    scaler._looks_at = 0.0
    scaler.round()
    assert ours.machines() == {} and theirs.machines() == {"box-theirs": "box"}
    store = ScalingStore(fleet.app.redis, fleet.app.keys)
    assert store.counts()["orphans"] == 1
    assert [one.id for one in store.unknown()] == ["box-theirs"]
