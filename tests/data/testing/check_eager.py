"""Runs inside the pytest that tests/integration/test_testing_plugin.py starts: Celery's eager mode."""

from __future__ import annotations

import os
from typing import Any

import pytest
from celery import chain, chord, group
from jobs import add, block, fail, gpus, halfway, merged, third_time, total

from gpuflow import app, submit


def test_calls_run_in_this_process(gpuflow_eager: Any) -> None:
    assert gpuflow_eager is app
    assert gpus.delay().get() == "7", "the environment is that of the test"
    assert gpus.apply_async(resources="24GB+", queue="gpu-any").get() == "7"
    assert add.delay(1, 2).get() == 3
    assert merged.delay(4).get() == [4, os.getpid()]


def test_what_fails_raises_where_it_is_asked_for(gpuflow_eager: Any) -> None:
    failed = fail.delay()

    assert failed.state == "FAILURE"
    with pytest.raises(ValueError, match="not that"):
        failed.get()


def test_canvas_runs_in_this_process(gpuflow_eager: Any) -> None:
    several = group(add.s(one, one) for one in range(3))

    assert chain(add.s(1, 2), add.s(3)).delay().get() == 6
    assert several.delay().get() == [0, 2, 4]
    assert chord(several, total.s()).delay().get() == 6
    assert chain(several, total.s(), add.s(1)).delay().get() == 7


def test_retries_and_states_are_celerys(gpuflow_eager: Any) -> None:
    assert third_time.delay().get() == 2
    assert halfway.delay().get() == 7


def test_templates_need_a_server(gpuflow_eager: Any) -> None:
    with (
        pytest.warns(match="no effect on send_task"),
        pytest.raises(Exception, match="use-the-fixture-gpuflow_fleet"),
    ):
        submit({"taskType": "echo", "echo": {"output": 1}})


def test_after_it_calls_are_sent_again(gpuflow_fleet: Any, tmp_path: Any) -> None:
    assert app.conf.task_always_eager is False
    assert gpuflow_fleet.record(block.delay(str(tmp_path))).state == "QUEUED"
