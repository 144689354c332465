"""Fixtures of the command line's tests: a runner with folders of its own, and no broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuflow.cli import cli

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No REDIS_URL, no settings file, state and results in a folder of the test."""
    for name in ("REDIS_URL", "GPUFLOW_CONFIG", "GPUFLOW_DEBUG", "WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUFLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("GPUFLOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUFLOW_ENV_DIR", str(tmp_path / "environments"))
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path / "results"))
    monkeypatch.setenv("GPUFLOW_SUBMIT_TIMEOUT_SEC", "0.1")
    # `run` and `up` guard their process; here it is that of all tests.
    monkeypatch.setattr("gpuflow.process_guard.guard_process", lambda *_: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def invoke() -> Invoke:
    """Run a command line in this process."""

    def run(*arguments: str, **extra: object) -> Result:
        result = CliRunner().invoke(cli, list(arguments), **extra)  # type: ignore[arg-type]
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr
        return result

    return run
