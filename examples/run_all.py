"""Runs every shipped pipeline as a new user does: `gpuflow run NAME`, in an empty folder, with an empty HOME each.

    python examples/run_all.py                   # all of them; those that load a model download it each time
    python examples/run_all.py echo graph        # some
    python examples/run_all.py --shared-home     # one HOME for all: models are downloaded once

Prints a table with the seconds and the exit code of each, and the end of what a failed one has printed. Its own exit
code is 0 if every exit code is 0. Needs gpuflow in this Python, and the extras that the examples name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from gpuflow.spec.presets import list_presets

RECEIVER = Path(__file__).with_name("receiver.py")
COMMAND = (sys.executable, "-c", "from gpuflow.cli import main; main()")
LONGEST_SECONDS = 1800


def needs(name: str) -> dict[str, str]:
    """Return the variables that an example needs (the second comment line of its file)."""
    return {
        "callback": {"CALLBACK_KEY": "example-key"},
        "labels": {"WORKER_TAGS": "example-lab"},
        "secrets": {"EXAMPLE_TOKEN": "not-a-real-token"},
    }.get(name, {})


#: Modules with functions that an example calls, from the folder of that project.
FUNCTIONS = {"function": "my_team.jobs"}
PROJECT = Path(__file__).with_name("functions")


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new user: nothing of gpuflow is set, and nothing is in the home."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "XDG_"))}
    kept.pop("REDIS_URL", None)
    return {**kept, "HOME": str(home), **more}


def run(name: str, home: Path, folder: Path) -> tuple[float, int, str]:
    """Run one example; return its seconds, its exit code and what it printed."""
    options = ["--include", FUNCTIONS[name]] if name in FUNCTIONS else []
    if options:
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        folder.mkdir(parents=True)
    env = environment(home, needs(name))
    with ExitStack() as stack:
        if name == "callback":
            receiver = subprocess.Popen([sys.executable, str(RECEIVER)], env=env, stdout=subprocess.PIPE, text=True)
            stack.callback(receiver.communicate)
            stack.callback(receiver.terminate)
            if receiver.stdout is not None:
                receiver.stdout.readline()  # it listens
        if name == "train-ppo":  # needs an older TRL than the others, and so an environment of its own
            subprocess.run([*COMMAND, "env", "create", "ppo"], cwd=folder, env=env, capture_output=True, check=False)
        began = time.monotonic()
        done = subprocess.run(
            [*COMMAND, "run", name, *options],
            check=False,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_SECONDS,
        )
        return time.monotonic() - began, done.returncode, done.stdout


def main() -> int:
    """Run the examples and print the table."""
    parser = argparse.ArgumentParser(description="Run the shipped pipelines as a new user does.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a shipped pipeline (default: all)")
    parser.add_argument("--shared-home", action="store_true", help="one HOME for all: models are downloaded once")
    parser.add_argument("--verbose", action="store_true", help="print what each of them prints")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(list_presets("pipelines"))):
        parser.error(f"no shipped pipeline {', '.join(unknown)}; `gpuflow presets pipelines` lists them")
    worst = 0
    print("| example | seconds | exit code |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="gpuflow-examples-") as root:
        for name in chosen.names or list_presets("pipelines"):
            home = Path(root, "home" if chosen.shared_home else f"{name}-home")
            seconds, code, output = run(name, home, Path(root, name))
            print(f"| `{name}` | {seconds:.1f} | {code} |", flush=True)
            if code or chosen.verbose:
                print(output[-3000:], file=sys.stderr, flush=True)
            worst = max(worst, abs(code))
    return min(worst, 1)


if __name__ == "__main__":
    sys.exit(main())
