"""How far a build is, from what pip says and what lies on disk, and what is shown of it without a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.cli import env as command
from gpuflow.environments import Progress
from gpuflow.environments.installing import _Reader


def test_what_arrives_is_counted_in_megabytes_and_then_in_packages(tmp_path: Path) -> None:
    site, temporary = tmp_path / "site", tmp_path / "tmp"
    (site / "pip-26.dist-info").mkdir(parents=True)
    temporary.mkdir()
    reader = _Reader("torch==2.13.0", temporary, site, lambda _: None)

    assert reader._progress() == Progress(phase="torch==2.13.0", done=0, unit="MB")
    reader.feed("Collecting torch==2.13.0\n")
    reader.feed("  Downloading https://index/torch-2.13.0-cp311.whl (900.0 MB)\n")
    (temporary / "part").write_bytes(bytes(2_500_000))
    assert reader._progress() == Progress(phase="torch-2.13.0-cp311.whl", done=2.5, unit="MB")
    (temporary / "part").unlink()
    assert reader._progress().done == 2.5  # it never goes back

    reader.feed("Installing collected packages: mpmath, sympy, torch\n")
    (site / "mpmath-1.dist-info").mkdir()
    assert reader._progress() == Progress(phase="installing", done=1, total=3, unit="packages")


def test_pips_temporary_folder_that_has_gone_counts_nothing(tmp_path: Path) -> None:
    assert _Reader("x", tmp_path / "no", tmp_path / "none", lambda _: None)._progress() == Progress(
        phase="x", unit="MB"
    )


def test_without_a_terminal_a_line_is_written_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    show = command._lines("vllm (cpu)", clock=lambda: now[0])

    show(Progress(phase="virtual environment"))
    for megabytes, seconds in ((0, 1), (10, 1), (400, 30)):
        now[0] += seconds
        show(Progress(phase="torch.whl", done=megabytes, unit="MB"))
    show(Progress(phase="installing", done=1, total=10, unit="packages"))
    show(Progress(phase="check"))

    assert capsys.readouterr().err.splitlines() == [
        "vllm (cpu): virtual environment",
        "vllm (cpu): torch.whl",
        "vllm (cpu): torch.whl  400.0 MB",
        "vllm (cpu): installing  1 of 10 packages",
        "vllm (cpu): check",
    ]
