"""Pools that `-P` names: ours stays; one that has patched the threads of the worker is refused."""

from __future__ import annotations

from typing import Any

import pytest
from celery.concurrency.solo import TaskPool

from gpuflow.worker.main import CannotStart, check_pool
from gpuflow.worker.pool import SupervisorPool


@pytest.mark.parametrize("pool", [SupervisorPool, TaskPool])
def test_a_pool_that_patches_nothing_is_let_pass(pool: Any) -> None:
    check_pool(pool)


@pytest.mark.parametrize("name", ["gevent", "eventlet"])
def test_a_pool_that_patches_threads_is_refused(name: str) -> None:
    pool = type("TaskPool", (TaskPool,), {"__module__": f"celery.concurrency.{name}"})

    with pytest.raises(CannotStart, match=f"-P {name}: "):
        check_pool(pool)
