"""The environment `vllm`, as `gpuflow env create vllm --variant cpu` built it (tox -e vllm)."""

from __future__ import annotations

import json
import subprocess

import pytest

from gpuflow.environments import examine, find, standings
from gpuflow.settings import Settings

pytestmark = pytest.mark.vllm


def test_it_works() -> None:
    settings = Settings.load()
    standing = next(one for one in standings(settings, "vllm") if one.variant == "cpu")

    finding = examine(settings, standing)

    assert finding is not None, standing.mend
    assert finding.problem == ""


def test_a_child_in_it_has_its_own_libraries_and_our_packages() -> None:
    ready = find(Settings.load(), "vllm")
    assert ready is not None
    program = (
        "import json, sys, executors.registry, gpuflow.spec.presets, torch, transformers;"
        "print(json.dumps([sys.prefix, torch.__file__, transformers.__version__, 'celery' in sys.modules]))"
    )

    done = subprocess.run(
        [str(ready.python), "-P", "-c", program],
        env={"PYTHONPATH": ready.python_path or "", **ready.variables},
        capture_output=True,
        text=True,
        check=True,
    )

    prefix, torch, transformers, has_celery = json.loads(done.stdout.strip().splitlines()[-1])
    assert prefix == str(ready.python.parent.parent)
    assert torch.startswith(prefix)
    assert transformers == "5.19.0"
    assert not has_celery
