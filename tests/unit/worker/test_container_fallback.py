"""Without an engine a preset runs as a process of the worker: as the operator wrote it, not as a template wants it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuflow.settings import Settings
from gpuflow.spec.container_policy import ContainerAsk, ContainerPolicy, refusal
from gpuflow.worker.containers.local import local_container
from gpuflow.worker.merged_inputs import RefusedVariable


def as_local(folder: Path, **section: Any) -> dict[str, Any]:
    preset = {"image": "acme/tool:1", "command": ["tool"], "process": {"command": ["tool", "--here"]}}
    (folder / "tool.yaml").write_text(json.dumps(preset))
    settings = Settings(container_engine="none", container_presets=folder, state_dir=folder / "state")
    spec = local_container({"taskType": "container", "container": {"preset": "tool", **section}}, settings)
    return dict(spec["container"])


def test_the_preset_as_it_is_runs_as_a_process(tmp_path: Path) -> None:
    assert as_local(tmp_path, env_vars={"MODE": "fast"})["process"]["command"] == ["tool", "--here"]


@pytest.mark.parametrize("field", ["command", "entrypoint", "workdir"])
def test_what_only_a_container_would_confine_is_not_run(tmp_path: Path, field: str) -> None:
    section = as_local(tmp_path, **{field: "/bin/id"})

    assert section["process"] is None
    assert f"without which {field} of a template is not run" in section["no_engine"]


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH"])
def test_no_variable_comes_in_that_a_task_may_not_set(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedVariable, match=name):
        as_local(tmp_path, env_vars={name: "/tmp/x"})


def test_a_first_part_with_capitals_is_a_registry() -> None:
    policy = ContainerPolicy(preset_images=(), images=("docker.io/*/*",), mount_roots=())

    assert refusal(ContainerAsk(image="acme/tool"), policy) is None
    assert refusal(ContainerAsk(image="Acme/tool"), policy) is not None
