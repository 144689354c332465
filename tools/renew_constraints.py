"""Writes constraints.txt and constraints-vllm.txt anew: the exact versions that the gate installs.

python tools/renew_constraints.py            # constraints.txt
python tools/renew_constraints.py --vllm     # constraints-vllm.txt, by building the environment (3.6 GB)

The newest versions that pyproject.toml allows, in one resolution for all environments of tox.ini; then run the gate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXTRAS: Final = "test,lint,train,rag,tracking"
#: What the gate installs beside the project: the runner, and what builds its wheel.
BESIDE: Final = ("tox>=4.20,<5", "hatchling>=1.27")
#: Of the virtual environment itself, or ours.
LEFT_OUT: Final = ("pip==", "setuptools==", "gpuflow")
HEAD: Final = "# Exact versions that the gate installs. Made by tools/renew_constraints.py; not edited by hand.\n"


def main() -> None:
    """Resolve in a new environment and write what was installed."""
    parser = argparse.ArgumentParser(description="Write the constraints of the gate anew.")
    parser.add_argument("--vllm", action="store_true", help="those of the vLLM environment")
    vllm = parser.parse_args().vllm
    with tempfile.TemporaryDirectory() as folder:
        python = _make(Path(folder) / "venv")
        if vllm:
            _run(python, "-m", "pip", "install", "-q", str(ROOT))
            settings = {**os.environ, "GPUFLOW_ENV_DIR": folder}
            _run(python.with_name("gpuflow"), "env", "create", "vllm", "--variant", "cpu", env=settings)
            (python,) = Path(folder).glob("vllm/*/bin/python")
        else:
            # By itself and first: where the index offers a wheel for the CPU alone, that one is taken.
            _run(python, "-m", "pip", "install", "-q", "torch==2.13.0")
            _run(python, "-m", "pip", "install", "-q", f"{ROOT}[{EXTRAS}]", *BESIDE)
        frozen = subprocess.run([python, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, check=True)
    # A version for one kind of machine (2.13.0+cpu) holds for all kinds without that suffix.
    pins = [line.partition("+")[0] for line in frozen.stdout.splitlines() if not line.startswith(LEFT_OUT)]
    target = ROOT / ("constraints-vllm.txt" if vllm else "constraints.txt")
    target.write_text(HEAD + "".join(f"{pin}\n" for pin in pins))
    print(f"{target.name}: {len(pins)} packages")


def _make(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)


if __name__ == "__main__":
    main()
