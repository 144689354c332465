"""Pools that `-P` names: ours stays; any other is refused, with what to say instead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from celery.concurrency.solo import TaskPool

from gpuflow.worker.main import CannotStart, check_pool
from gpuflow.worker.pool import SupervisorPool
from tests.support.waiting import patient


def test_our_pool_stays() -> None:
    check_pool(SupervisorPool, named=False)


@pytest.mark.parametrize(
    ("module", "name"),
    [("prefork", "prefork"), ("thread", "threads"), ("solo", "solo"), ("gevent", "gevent"), ("eventlet", "eventlet")],
)
def test_another_pool_is_refused(module: str, name: str) -> None:
    pool = type("TaskPool", (TaskPool,), {"__module__": f"celery.concurrency.{module}"})

    with pytest.raises(CannotStart, match=f"-P {name}: .*leave -P out.* -c .* --max-jobs"):
        check_pool(pool, named=True)


@pytest.mark.parametrize("name", ["prefork", "threads"])  # the first is what Celery has without -P
def test_a_command_line_with_a_pool_ends_with_the_mend(name: str) -> None:
    command = [sys.executable, "-m", "celery", "-A", "gpuflow", "worker", "-P", name]
    address = {"REDIS_URL": "redis://127.0.0.1:1/0"}  # nobody is asked

    done = subprocess.run(
        command, env={**os.environ, **address}, capture_output=True, text=True, check=False, timeout=patient(60)
    )

    assert done.returncode == 2
    assert f"Error: -P {name}: a worker has one pool" in done.stderr
