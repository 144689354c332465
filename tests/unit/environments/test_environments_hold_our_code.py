"""What an environment pins is enough for gpuflow's own executors to be imported in it, and its check imports them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from executors.registry import _ON_VLLM, EXECUTORS
from gpuflow.environments import load
from gpuflow.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
#: Imports modules while every distribution is hidden that the pins do not bring. argv: pins, modules.
PROGRAM = """
import json, re, sys
from importlib import import_module, metadata

pins, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

brought, waiting = set(), [plain(pin) for pin in pins]
while waiting:
    name = waiting.pop()
    if name in brought:
        continue
    brought.add(name)
    try:
        needed = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        continue  # installed where that environment is, not here
    waiting += [plain(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0]) for one in needed if "extra ==" not in one]
owners = metadata.packages_distributions()

class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("gpuflow", "executors", "tasks"):
            return None
        if top in owners and not any(plain(owner) in brought for owner in owners[top]):
            raise ModuleNotFoundError(f"No module named {name!r}, and no pin brings it", name=name)
        return None

sys.meta_path.insert(0, Hidden())
for module in modules:
    import_module(module)
"""


def modules_of(name: str) -> list[str]:
    places = _ON_VLLM if name == "vllm" else EXECUTORS
    return sorted({places[task_type].partition(":")[0] for task_type in load(Settings(), name).task_types})


@pytest.mark.parametrize("name", ["default", "ppo", "vllm"])
def test_the_executors_of_an_environment_load_with_what_it_pins(name: str) -> None:
    for recipe in load(Settings(), name).variants.values():
        # What vllm brings with it is read of its own list of versions.
        more = constraints() if name == "vllm" else []
        pins = [pin.partition("==")[0] for pin in recipe.pins]
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, json.dumps([*pins, *more]), json.dumps(modules_of(name))],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["default", "ppo", "vllm"])
def test_an_environment_counts_as_built_only_when_its_executors_load_in_it(name: str) -> None:
    assert set(modules_of(name)) <= set(load(Settings(), name).check.imports)


def constraints() -> list[str]:
    lines = (ROOT / "constraints-vllm.txt").read_text("utf-8").splitlines()
    return [line.partition("==")[0].partition("[")[0] for line in lines if "==" in line and not line.startswith("#")]
