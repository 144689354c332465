"""When beat scales at all: only where an operator has asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.scaling.autoscaler import is_asked_for
from gpuflow.settings import Settings


@pytest.mark.parametrize(
    ("environment", "scales"),
    [
        ({}, False),
        ({"HEARTBEAT_INTERVAL_SEC": "5"}, False),
        ({"GPUFLOW_SCALING_POLICY": ""}, False),
        ({"GPUFLOW_SCALING_POLICY": "local"}, True),
        ({"ENABLE_ELASTIC_SCALING": "true"}, True),
        ({"ELASTIC_AUTO_DISABLE_IDLE_SEC": "60"}, True),
        ({"ELASTIC_AUTO_MIN_ACTIVE_WORKERS": "0"}, True),
        ({"ELASTIC_AUTO_MIN_ACTIVE_WORKERS": "0", "ENABLE_ELASTIC_SCALING": "false"}, False),
        ({"GPUFLOW_SCALING_POLICY": "local", "ENABLE_ELASTIC_SCALING": "false"}, False),
    ],
)
def test_nothing_scales_unasked(environment: dict[str, str], scales: bool, tmp_path: Path) -> None:
    assert is_asked_for(Settings.load(env=environment, cwd=tmp_path)) is scales
