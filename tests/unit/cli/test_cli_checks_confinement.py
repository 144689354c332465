"""What `gpuflow doctor` says about the user and the sandbox of tasks."""

from __future__ import annotations

import os

import pytest

from gpuflow.cli.checks import Check
from gpuflow.cli.checks_confinement import confinement_checks
from gpuflow.settings import Settings
from gpuflow.worker import bubblewrap


def look(**env: str) -> Check:
    [check] = confinement_checks(Settings.load(env=env))
    return check


def test_a_worker_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check = look()
    assert (check.status, "GPUFLOW_CHILD_USER is not set" in check.detail) == ("warn", True)
    check = look(GPUFLOW_CHILD_USER="nobody")
    assert (check.status, check.detail) == ("ok", "run as nobody")


def test_a_worker_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look().status == "ok"


def test_a_sandbox_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "program", lambda: None)
    check = look(GPUFLOW_ISOLATE="bubblewrap")
    assert check.status == "fail"
    assert "bwrap is not installed" in check.detail
