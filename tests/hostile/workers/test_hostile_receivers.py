"""A receiver of notices that never answers: pipelines go on meanwhile."""

from __future__ import annotations

from gpuflow.client import submit, submit_pipeline
from tests.support.fleet import TestFleet
from tests.support.hostile_peer import HostilePeer
from tests.support.waiting import eventually, patient


def test_a_tarpit_with_a_hundred_notices(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--max-jobs", "2")
    with HostilePeer() as peer:
        notify = [{"on": ["finished"], "url": f"{peer.url}/drip-header/{number}"} for number in range(10)]
        for _ in range(10):
            submit({**fleet.echo(output=1), "notify": notify}, app=fleet.app)
        eventually(lambda: len(peer.asked) >= 2, what="the calls")

        run = submit_pipeline(
            {
                "apiVersion": "gpuflow/v1",
                "kind": "Pipeline",
                "metadata": {"name": "goes-on"},
                "spec": {
                    "stages": [
                        {"name": "first", "spec": fleet.echo(output=1)},
                        {"name": "second", "dependsOn": ["first"], "spec": fleet.echo(output=2)},
                    ]
                },
            },
            app=fleet.app,
        )
        run.wait(timeout=patient(60))

        assert run.state == "SUCCEEDED"
        assert len(peer.asked) < 100  # they still wait for each other
