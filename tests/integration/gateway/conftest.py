"""Fixtures of the gateway's tests: one real process for all, and a task id for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.gateway import Gateway
from tests.support.waiting import patient


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a token."""
    with Gateway(tmp_path_factory.mktemp("gateway")) as started:
        yield started


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    """A client with the token."""
    with httpx.Client(base_url=gateway.results_url, headers=gateway.headers, timeout=patient(30)) as made:
        yield made


@pytest.fixture
def task() -> str:
    """A task id of this test."""
    return f"task-{uuid.uuid4()}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 8 MiB, no two blocks of it alike."""
    path = tmp_path / "source.bin"
    path.write_bytes(b"".join(number.to_bytes(8, "big") for number in range(1 << 20)))
    return path
