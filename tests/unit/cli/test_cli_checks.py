"""The checks of `gpuflow doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpuflow.cli import checks
from gpuflow.fleet.hardware import Hardware
from gpuflow.settings import Settings
from tests.support.fake_engine import FakeEngine

Invoke = Callable[..., Result]
VALKEY = {"valkey_version": "9.1.2", "redis_version": "7.2.4"}


def settings(**env: str) -> Settings:
    return Settings.load(env=env)


def test_doctor_tells_checks_and_where_settings_come_from(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLOW_LEASE_SEC", "45")
    told = invoke("doctor", "--json")
    shown = json.loads(told.stdout)
    assert told.exit_code == (0 if shown["ok"] else 1)
    names = [check["name"] for check in shown["checks"]]
    assert {"settings", "broker", "gpus", "inference", "training", "results folder", "packages"} <= set(names)
    assert all(set(check) == {"name", "status", "detail", "mend"} for check in shown["checks"])
    lease = next(one for one in shown["settings"] if one["env"] == "GPUFLOW_LEASE_SEC")
    assert (lease["value"], lease["source"]) == ("45.0", "environment variable GPUFLOW_LEASE_SEC")
    text = invoke("doctor").stdout
    assert "GPUFLOW_LEASE_SEC" in text and "GPUFLOW_GRACE_SEC" not in text, "a default pushes findings off the screen"
    assert "more settings have their defaults; --all lists them" in text
    assert "GPUFLOW_GRACE_SEC" in invoke("doctor", "--all").stdout


def test_doctor_goes_on_when_settings_are_wrong(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLOW_LEASE_SEC", "soon")
    told = invoke("doctor", "--json")
    assert told.exit_code == 1
    shown = json.loads(told.stdout)
    assert shown["checks"][0]["status"] == "fail"
    assert "GPUFLOW_LEASE_SEC" in shown["checks"][0]["detail"]


@pytest.mark.parametrize(("prefix", "status"), [("", []), ("t1:", []), ("gpu-lab:", ["warn"]), ("t1:task:", ["warn"])])
def test_a_prefix_that_other_fleets_take_for_their_keys(prefix: str, status: list[str]) -> None:
    found = checks.prefix(settings(GPUFLOW_KEY_PREFIX=prefix))
    assert [check.status for check in found] == status
    assert all("GPUFLOW_KEY_PREFIX" in check.mend for check in found)


def test_an_unreachable_broker_fails_and_hides_the_password() -> None:
    [check] = checks.broker(settings(REDIS_URL="redis://:hunter2@127.0.0.1:1/0"))
    assert check.status == "fail"
    assert "hunter2" not in check.detail + check.mend
    assert "REDIS_URL" in check.mend


def test_gpus_that_are_all_lost_are_not_called_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Hardware(
        gpus=(), cpu_count=2, memory_total_mib=1, memory_available_mib=1, hostname="box", problems=("GPU 0 is lost",)
    )
    monkeypatch.setattr("gpuflow.fleet.hardware.probe", lambda: lost)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told, problem = checks.gpus()
    assert (told.status, problem.detail) == ("fail", "GPU 0 is lost")
    assert "hides" not in told.detail and "dmesg" in told.mend
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides them" in checks.gpus()[0].detail


def test_a_device_that_nobody_wants_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Hardware(
        gpus=(), cpu_count=2, memory_total_mib=1, memory_available_mib=1, hostname="box", nvml="no NVIDIA driver"
    )
    monkeypatch.setattr("gpuflow.fleet.hardware.probe", lambda: machine)
    monkeypatch.setattr("gpuflow.fleet.hardware_host.has_nvidia_device", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [check.status for check in checks.gpus()] == ["fail"]
    assert machine.driver_problem == "no NVIDIA driver"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [check.status for check in checks.gpus()] == ["ok"]
    assert machine.driver_problem == ""


def test_without_redis_url_the_embedded_server_is_named(tmp_path: Path) -> None:
    [check] = checks.broker(settings(GPUFLOW_STATE_DIR=str(tmp_path)))
    assert check.status == "ok"
    [wrong] = checks.broker(settings(GPUFLOW_STATE_DIR=str(tmp_path), GPUFLOW_VALKEY_SERVER=str(tmp_path / "none")))
    assert wrong.status == "fail"


@pytest.mark.parametrize(
    ("info", "status"),
    [
        (VALKEY, "ok"),
        ({"redis_version": "7.4.0"}, "ok"),
        ({"redis_version": "6.2.14"}, "ok"),
        ({"redis_version": "5.0.7"}, "fail"),
        ({"redis_version": "odd"}, "fail"),
        ({**VALKEY, "cluster_enabled": 1}, "fail"),
    ],
)
def test_version(info: dict[str, Any], status: str) -> None:
    assert checks._version("redis://x", info).status == status


class Server:
    """Answers what the checks ask: its time, and when a beat has reconciled."""

    def __init__(self, *, now: float, reconciled_at: float | None = None) -> None:
        self.now, self.reconciled_at = now, reconciled_at

    def time(self) -> tuple[int, int]:
        return int(self.now), int(self.now % 1 * 1e6)

    def hget(self, key: str, name: str) -> str | None:
        assert (key, name) == ("gpuflow.metrics", "reconciled_at")
        return None if self.reconciled_at is None else str(self.reconciled_at)


@pytest.mark.parametrize(
    ("ago", "status", "told"),
    [(7, "ok", "reconciled 7 s ago"), (3600, "warn", "has reconciled for 1"), (None, "warn", "none has run yet")],
)
def test_a_beat_that_is_missing_is_told(ago: float | None, status: str, told: str) -> None:
    server = Server(now=1_000_000, reconciled_at=None if ago is None else 1_000_000 - ago)
    check = checks._beat(server, settings())
    assert check.status == status and told in check.detail
    assert status == "ok" or "celery -A gpuflow beat" in check.mend


@pytest.mark.parametrize(("skew", "told"), [(0, None), (3, None), (-3, None), (120, "ahead of"), (-120, "behind")])
def test_a_clock_that_differs_from_the_brokers_is_told(
    monkeypatch: pytest.MonkeyPatch, skew: float, told: str | None
) -> None:
    monkeypatch.setattr(checks.time, "time", lambda: 1_000_000 + skew)
    found = checks._clocks(Server(now=1_000_000))
    assert [told for check in found if told and told in check.detail] == ([told] if told else [])
    assert bool(found) == bool(told)


def test_a_server_that_takes_no_writes_is_told() -> None:
    assert checks._replica({"role": "master"}) == checks._replica({}) == []
    (found,) = checks._replica({"role": "slave", "master_host": "10.0.0.6", "master_port": 6379})
    assert found.status == "fail" and "10.0.0.6:6379" in found.detail + found.mend and "REPLICAOF" in found.mend


@pytest.mark.parametrize(
    ("used", "limit", "status"), [(5, 0, []), (84, 100, []), (86, 100, ["warn"]), (100, 100, ["fail"])]
)
def test_memory_of_the_server_that_is_almost_used_up_is_told(used: int, limit: int, status: list[str]) -> None:
    found = checks._memory({"used_memory": used * 2**20, "maxmemory": limit * 2**20})
    assert [check.status for check in found] == status
    assert all(f"{used} of {limit} MiB" in check.detail and "maxmemory" in check.mend for check in found)


@pytest.mark.parametrize(
    ("info", "volatile", "status"),
    [
        ({"aof_enabled": 1}, "", "ok"),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "", "fail"),
        ({"aof_enabled": 0}, "", "fail"),
        ({"aof_enabled": 0}, "1", "warn"),
    ],
)
def test_persistence(info: dict[str, Any], volatile: str, status: str) -> None:
    check = checks._persistence(info, "everysec", settings(GPUFLOW_ALLOW_VOLATILE=volatile))
    assert check.status == status
    assert status == "ok" or check.mend


@pytest.mark.parametrize(
    ("info", "volatile", "status"),
    [
        ({"maxmemory_policy": "noeviction", "maxmemory": 1}, "", "ok"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 0}, "", "ok"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 1}, "", "fail"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 1}, "1", "warn"),
        ({}, "", "ok"),
    ],
)
def test_eviction(info: dict[str, Any], volatile: str, status: str) -> None:
    assert checks._eviction(info, settings(GPUFLOW_ALLOW_VOLATILE=volatile)).status == status


def test_a_folder_that_cannot_be_one_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = checks.folder("results folder", tmp_path / "file" / "below", "RESULTS_DIR")
    assert check.status == "fail"
    assert "RESULTS_DIR" in check.mend
    assert checks.folder("results folder", tmp_path / "new" / "deep", "X").status != "fail"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("free_gib", "status"), [(0.5, "fail"), (5, "warn"), (500, "ok")])
def test_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, status: str) -> None:
    class Usage:
        free = free_gib * 2**30

    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: Usage)
    assert checks.folder("x", tmp_path, "X").status == status


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks.util.find_spec
    monkeypatch.setattr(checks.util, "find_spec", lambda name: None if name == "trl" else found(name))
    training = next(check for check in checks.environments() if check.name == "training")
    assert training.status == "warn"
    assert "trl" in training.detail
    assert "gpuflow[train]" in training.mend


def test_a_checkout_of_gpuflow_is_no_failure(tmp_path: Path) -> None:
    for name in ("tasks", "executors", "gpuflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    found = checks.shadowing(tmp_path)
    assert (found.status, "is a checkout of gpuflow" in found.detail) == ("warn", True)
    (tmp_path / "gpuflow" / "__init__.py").unlink()
    assert checks.shadowing(tmp_path).status == "fail"


def test_a_module_that_hides_ours_is_found(tmp_path: Path) -> None:
    assert checks.shadowing(tmp_path).status == "ok"
    (tmp_path / "tasks.py").write_text("")
    check = checks.shadowing(tmp_path)
    assert check.status == "fail"
    assert str(tmp_path / "tasks.py") in check.detail


def test_the_container_engine_and_presets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("image: a b")
    own = {"GPUFLOW_CONTAINER_PRESETS": str(tmp_path)}

    none, preset = checks.containers(settings(GPUFLOW_CONTAINER_ENGINE="none", **own))
    assert (none.status, "presets run as plain processes" in none.detail) == ("ok", True)
    assert (preset.name, preset.status) == ("container preset mine", "fail")
    (gone,) = checks.containers(settings(GPUFLOW_CONTAINER_ENGINE=f"unix://{tmp_path}/no.sock"))
    assert (gone.status, "does not answer" in gone.detail) == ("fail", True)
    engine = FakeEngine(tmp_path)
    try:
        (there,) = checks.containers(settings(GPUFLOW_CONTAINER_ENGINE=engine.url))
    finally:
        engine.close()
    assert (there.status, there.detail) == ("ok", f"engine 27.0.0 at {engine.path}")
