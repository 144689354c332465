"""The way of a newcomer: it fetches a real model and takes minutes, so it runs on CI, or when named by its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty home; its cache serves all tests of the module."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def environment(home: Path, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "XDG_", "COVERAGE_"))}
    kept.pop("REDIS_URL", None)
    cache = os.environ.get("GPUFLOW_CACHE_DIR") or str(home / "cache")
    # A mark by which every process of this test is found, wherever it ends up.
    return {**kept, "HOME": str(home), "GPUFLOW_CACHE_DIR": cache, "GPUFLOW_TEST_MARK": str(tmp_path)}
