"""The example project of functions (examples/functions/README.md): its own tests pass, as a new user runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpuflow.cluster.commands import with_our_packages
from tests.support.examples import ROOT
from tests.support.waiting import patient


def test_its_tests_pass(tmp_path: Path) -> None:
    project, home = tmp_path / "functions", tmp_path / "home"
    shutil.copytree(ROOT / "examples" / "functions", project, ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "XDG_", "PYTEST"))}
    mark = {name: value for name, value in os.environ.items() if name.startswith("GPUFLOW_TEST_")}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"gpuflow_timeout={patient(60):g}"],
        cwd=project,
        env=with_our_packages({**kept, **mark, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}),
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert list(home.iterdir()) == []


def test_its_functions_run_in_stages(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    project = shutil.copytree(ROOT / "examples" / "functions", tmp_path / "functions")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "XDG_", "REDIS_"))}
    command = [sys.executable, "-c", "from gpuflow.cli import main; raise SystemExit(main())"]

    done = subprocess.run(
        [*command, "run", "function", "--include", "my_team.jobs"],
        cwd=project,
        env=with_our_packages({**kept, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}),
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert '{"value": 3}' in done.stdout and '"values": [{"vectors": [[3.0], [3.0], [5.0]]' in done.stdout
