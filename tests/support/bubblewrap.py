"""Tests that need bubblewrap: CI has it, and another machine is told."""

from __future__ import annotations

import os
import shutil

import pytest


def need_bubblewrap() -> None:
    """Skip a test where bubblewrap is not installed; fail it in CI."""
    if shutil.which("bwrap") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI installs bubblewrap (.ci/run)")
        pytest.skip("bwrap is not installed")
