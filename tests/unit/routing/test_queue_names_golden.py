"""The names of queues do not change from version to version: those of old asks are written down.

A name that differs here would leave the tasks of a running fleet in a queue that no new worker looks at. Add asks at
will; never change a name without a migration.
"""

import json
from pathlib import Path

import pytest

from gpuflow.routing.resources import requirement_from_resources

GOLDEN = json.loads((Path(__file__).parent / "golden" / "queue_names.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("resources", "name"), GOLDEN, ids=[name[:40] for _, name in GOLDEN])
def test_the_name_is_that_of_former_versions(resources, name):
    (requirement,) = requirement_from_resources(resources, gpu_available=True)
    assert requirement.queue_name() == name
