"""The places that the conformance suite runs on: one fixture `<kind>_place` for each kind of store, by name.

A new store adds its kind to KINDS and a fixture here; the tests stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gpuflow.artifacts.store import Store, Throttle, open_store
from gpuflow.settings import Settings
from tests.gate import leftovers
from tests.support.gateway import Gateway

KINDS: Final = ("local", "http", "s3")
AWS_ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "canary-s3-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
TRANSFER: Final = Path(__file__).with_name("transfer.py")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A destination that works, and how to spoil a file of it behind the store's back."""

    url: str
    token: str | None = None
    #: Replaces the content of a stored file by other bytes of the same length.
    replace: Callable[[str, bytes], None]
    #: Settings that a store of this place needs.
    settings: dict[str, Any]

    def open(self, **settings: Any) -> Store:
        return open_store(self.url, settings=Settings(**self.settings, **settings), token=self.token)

    def start(self, action: str, name: str, path: Path, **extra: Any) -> subprocess.Popen[str]:
        """Start a process that puts or gets one file; see transfer.py for `extra`."""
        order = {"action": action, "name": name, "path": str(path), "url": self.url, "token": self.token}
        order |= {"settings": self.settings, **extra}
        return subprocess.Popen(
            [sys.executable, "-W", "error", str(TRANSFER), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    found = request.getfixturevalue(f"{request.param}_place")
    assert isinstance(found, Place)
    return found


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The counts of bytes that went through any throttle: what was really sent or received."""
    counts: list[int] = []
    wait_for_bytes = Throttle.wait_for_bytes

    def counting(throttle: Throttle, count: int) -> None:
        counts.append(count)
        wait_for_bytes(throttle, count)

    monkeypatch.setattr(Throttle, "wait_for_bytes", counting)
    return counts


@pytest.fixture
def local_place(tmp_path: Path) -> Place:
    root = tmp_path / "shared"
    return Place(
        url=root.as_uri(), replace=lambda name, content: _discard((root / name).write_bytes(content)), settings={}
    )


def _discard(_: object) -> None:
    pass


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with leftovers.kept_for_the_session():
        started = Gateway(tmp_path_factory.mktemp("gateway"))
    with started:
        yield started


@pytest.fixture
def http_place(gateway: Gateway) -> Iterator[Place]:
    yield Place(
        url=gateway.results_url,
        token=gateway.token,
        replace=lambda name, content: _discard((gateway.root / name).write_bytes(content)),
        settings={},
    )
    for left in gateway.root.iterdir():
        shutil.rmtree(left, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in {**AWS_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)

    def replace(name: str, content: bytes) -> None:
        key = f"results/{name}"
        metadata = client.head_object(Bucket=bucket, Key=key)["Metadata"]
        client.put_object(Bucket=bucket, Key=key, Body=content, Metadata=metadata)

    yield Place(url=f"s3://{bucket}/results", replace=replace, settings={})
    client.close()
