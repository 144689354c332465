"""gpuflow.testing: machines as they are written, and what is told where their driver cannot be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.testing.environment import for_worker, import_path, without_settings
from gpuflow.testing.simulated_gpus import SimGpu, build_library, machine_gpus

MINE = SimGpu(model="L4", uuid="GPU-mine")


@pytest.mark.parametrize(
    ("written", "models"),
    [
        ("", []),
        ([], []),
        ("A100-80GB", ["A100-80GB"]),
        ("2xA100-80GB", ["A100-80GB"] * 2),
        ("2x A100-80GB", ["A100-80GB"] * 2),
        ("2 x a100-80gb + t4", ["A100-80GB", "A100-80GB", "T4"]),
        ("1xT4,2xRTX4090", ["T4", "RTX4090", "RTX4090"]),
        (["T4", "2xL4"], ["T4", "L4", "L4"]),
        (["T4", MINE], ["T4", "L4"]),
    ],
)
def test_a_machine_is_written_in_several_ways(written: str | list[str | SimGpu], models: list[str]) -> None:
    assert [gpu.model for gpu in machine_gpus(written)] == models


@pytest.mark.parametrize("written", ["A1000", "2x", "A100", "2xA100-80GB:1"])
def test_an_unknown_gpu_is_named_with_those_that_are_there(written: str) -> None:
    with pytest.raises(GPUFlowError, match=r"no simulated GPU '.*'; there are T4, .*A100-80GB"):
        machine_gpus(written)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    with pytest.raises(GPUFlowError, match=r"need a C compiler \(cc, gcc or clang\); run `apt-get install gcc"):
        build_library(tmp_path)


def test_what_a_compiler_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdio.h: No such file or directory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))

    with pytest.raises(GPUFlowError, match=r"exit code 1\); check .*libc6-dev`\nstdio.h: No such file"):
        build_library(tmp_path / "library")
    assert list((tmp_path / "library").iterdir()) == []


def test_other_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(GPUFlowError, match="need Linux"):
        build_library(tmp_path)


def test_settings_and_gpus_of_the_developer_are_left_out() -> None:
    theirs = {"HOME": "/home/me", "PATH": "/bin", "AWS_PROFILE": "team"}
    gpus = {"CUDA_VISIBLE_DEVICES": "1"}
    settings = {
        "REDIS_URL": "a",
        "GPUFLOW_NEW": "b",
        "CELERY_BROKER_URL": "c",
        "WORKER_TAGS": "d",
        "LOG_LEVEL": "DEBUG",
    }

    assert without_settings({**theirs, **gpus, **settings}) == {**theirs, **gpus}
    assert for_worker({**theirs, **gpus, **settings}) == theirs


def test_a_worker_finds_what_the_tests_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_team.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    path = import_path()

    done = subprocess.run([sys.executable, "-c", "import of_the_team"], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0
    assert not any(entry.endswith(("site-packages", "lib-dynload", ".zip")) for entry in path.split(":"))
