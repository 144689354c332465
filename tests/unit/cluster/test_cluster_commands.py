"""Command lines and environment of the parts of a local cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpuflow.cluster.commands import (
    free_port,
    gateway_command,
    gateway_installed,
    process_environment,
    share_gpus,
    worker_command,
)
from gpuflow.settings import Settings


def test_a_worker_is_told_its_name_and_limits() -> None:
    command = worker_command("w1", log_level="INFO", max_jobs=2, gpus="GPU-a,GPU-b")
    assert command[1:5] == ["-m", "celery", "-A", "gpuflow"]
    assert command[command.index("--name") + 1] == "w1"
    assert command[command.index("--max-jobs") + 1] == "2"
    assert command[command.index("--gpus") + 1] == "GPU-a,GPU-b"
    assert "--gpus" not in worker_command("w1", log_level="INFO", max_jobs=None, gpus=None)


def test_no_two_workers_get_the_same_gpu() -> None:
    assert share_gpus(["a", "b", "c"], 2) == ["a,c", "b"]
    assert share_gpus(["a"], 3) == ["a", "", ""]
    assert share_gpus(["a", "b"], 1) == [None]
    assert share_gpus([], 2) == [None, None]


def test_what_is_relative_here_is_absolute_there(tmp_path: Path) -> None:
    (tmp_path / "gpuflow.toml").write_text('RESULTS_DIR = "out"\n')
    settings = Settings.load(env={"HOME": str(tmp_path)}, cwd=tmp_path)
    environment = process_environment(settings, "redis://x", {"HOME": str(tmp_path), "A": "1"}, tmp_path)
    assert environment["RESULTS_DIR"] == str(tmp_path / "out")
    assert environment["GPUFLOW_CONFIG"] == str(tmp_path / "gpuflow.toml")
    assert environment["REDIS_URL"] == "redis://x"
    assert environment["A"] == "1"
    again = Settings.load(env=environment, cwd=tmp_path / "elsewhere")
    assert (again.results_dir, again.state_dir, again.cache_dir) == (
        settings.results_dir,
        settings.state_dir,
        settings.cache_dir,
    )


def test_without_a_settings_file_none_is_named(tmp_path: Path) -> None:
    settings = Settings.load(env={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert "GPUFLOW_CONFIG" not in process_environment(settings, "redis://x", {}, tmp_path)


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port


def test_a_gateway_is_there_when_all_that_it_needs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gateway_installed()
    assert gateway_command(8081)[-3:] == ["gateway", "--port", "8081"]
    monkeypatch.setattr("gpuflow.cluster.commands.find_spec", lambda name: None if name == "uvicorn" else object())
    assert not gateway_installed()
