"""Builds what an environment of tox needs beyond its packages, before any of its tests.

python -m tests.gate.builds NAME

Called in the environment itself, by tox.ini and by tests/gate/run.py. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: Commands by the name of the environment, and the constraints that pip gets. `{NAME}` is a variable of tox.ini.
BUILDS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "ml": (
        ("python", "-I", "-m", "pip", "install", "--no-deps", "--upgrade", "--target", "{PPO_TRL}", "trl==1.12.0"),
        "",
    ),
    "vllm": (("gpuflow", "env", "create", "vllm", "--variant", "cpu"), "constraints-vllm.txt"),
}


def main(name: str) -> int:
    """Build, and return the exit code. What is there already is kept."""
    (program, *arguments), constraints = BUILDS[name]
    if name == "ml" and list(Path(os.environ["PPO_TRL"]).glob("trl-1.12.0.dist-info")):
        return 0
    environment = {**os.environ, **({"PIP_CONSTRAINT": str(ROOT / constraints)} if constraints else {})}
    command = [Path(sys.executable).with_name(program), *(one.format_map(os.environ) for one in arguments)]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
