"""A local cluster: user and operator are one, so their folders and networks are open to tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.cluster.commands import process_environment
from gpuflow.policy.hosts import LOCAL_NETWORKS
from gpuflow.settings import Settings


def test_the_current_folder_the_home_and_local_networks_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = Settings(read_roots=("/data",), allow_hosts=("db.lab",))

    environment = process_environment(settings, "redis://h:1/0", {}, tmp_path / "here", own_broker=True)

    places = f"{tmp_path}/here,{tmp_path}/home"
    assert environment["GPUFLOW_READ_ROOTS"] == f"/data,{places}"
    assert environment["GPUFLOW_WRITE_ROOTS"] == places
    assert environment["GPUFLOW_ALLOW_HOSTS"] == ",".join(("db.lab", *LOCAL_NETWORKS))
    assert Settings.load(env=environment, cwd=tmp_path).write_roots == tuple(places.split(","))


def test_a_folder_that_would_open_everything_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")

    environment = process_environment(Settings(), "redis://h:1/0", {}, Path("/"), own_broker=True)

    assert environment["GPUFLOW_READ_ROOTS"] == environment["GPUFLOW_WRITE_ROOTS"] == ""


def test_where_others_submit_nothing_is_added(tmp_path: Path) -> None:
    environment = process_environment(Settings(), "redis://shared:1/0", {}, tmp_path)

    assert not {"GPUFLOW_READ_ROOTS", "GPUFLOW_WRITE_ROOTS", "GPUFLOW_ALLOW_HOSTS"} & environment.keys()
