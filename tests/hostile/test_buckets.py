"""Templates that name buckets: the worker's keys reach more than a task may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.artifacts.destination import destination_store
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.task_access import Access, judge_bucket, limited_to, results_of, task_roots
from gpuflow.cluster.commands import process_environment
from gpuflow.errors import InvalidSettings, NotAllowed
from gpuflow.settings import Settings

STORE = "s3://fleet/data"
DIGEST = "1" * 64


def access(settings: Settings) -> Access:
    spec = {
        "x": [
            f"{STORE}/upstream/attempt-1/a",
            f"{STORE}/victim/a",
            f"{STORE}/uploads/{DIGEST}/a#sha256={DIGEST}",
            STORE,
        ]
    }
    readers = results_of(spec, settings, "mine", lambda names: {"upstream"} & {*names})
    assert readers == {"mine", "upstream", f"uploads/{DIGEST}"}
    return Access(roots=task_roots(settings, readers), results_of=readers)


@pytest.mark.parametrize(
    "name",
    ["victim/a", "uploads", "uploads/a/b", f"uploads/{'2' * 64}/a", "", "mine", "mine/../victim/a",
     "mine/%2e%2e/victim/a", "mine%2F..%2Fvictim/a", "%76ictim/a", "vic\ttim/a", "victim/a?x",
     "mine/a#/../victim/a", "./victim/a"],
)  # fmt: skip
@pytest.mark.parametrize("allowed", [(), ("*",)])
def test_results_of_others_in_the_store_of_the_fleet(tmp_path: Path, name: str, allowed: tuple[str, ...]) -> None:
    settings = Settings(store_url=STORE, cache_dir=tmp_path, allow_buckets=allowed)
    for start in ("s3://fleet/data", "S3://fleet/data", "s3://FLEET/data", "s3://fleet//data"):
        url = f"{start}/{name}"
        for spec in (
            {"checkpoint": {"load": {"url": url, "headers": {"Authorization": "Bearer x"}}}},
            {"checkpoint": {"load": {"url": "${env:U}"}}},
            {"data": {"type": "jsonl", "url": url}},
            {"model": {"adapters": [{"url": url}]}},
        ):
            with limited_to(access(settings)), pytest.raises(NotAllowed):
                localize(spec, settings=settings, environment={"U": url})


def test_own_results_and_uploads_in_the_store_of_the_fleet() -> None:
    settings = Settings(store_url=STORE)
    with limited_to(access(settings)):
        for name in ("mine/attempt-1/a", "upstream/attempt-1/a%20b", f"uploads/{DIGEST}/rows.jsonl"):
            judge_bucket(f"{STORE}/{name}", settings)
    judge_bucket(f"{STORE}/victim/a", settings)  # a client of its own user


@pytest.mark.parametrize(
    ("url", "allowed", "is_allowed"),
    [
        ("s3://models/x", (), False),
        ("s3://models/x", ("*",), True),
        ("s3://models/x", ("model",), False),
        ("s3://models/x", ("models",), True),
        ("s3://models", ("models/x",), False),
        ("s3://models/x/y", ("models/x",), True),
        ("s3://models/xy", ("models/x",), False),
        ("s3://models/x/../z", ("models/x",), False),
        ("s3://models/2026-1/a", ("data,", "mod*/2026-*"), True),
        ("s3://models/2025/2026-1/a", ("mod*/2026-*",), False),
        ("s3://fleet/other/victim", (), False),
    ],
)
def test_other_buckets(url: str, allowed: tuple[str, ...], is_allowed: bool) -> None:
    settings = Settings(store_url=STORE, allow_buckets=allowed)
    with limited_to(access(settings)):
        if is_allowed:
            judge_bucket(url, settings)
            judge_bucket(url, settings, write=True)
            return
        with pytest.raises(NotAllowed, match=r"GPUFLOW_ALLOW_BUCKETS|not used"):
            judge_bucket(url, settings)
        with pytest.raises(NotAllowed) as refused:
            destination_store({"output": {"destination": {"type": "s3", "url": url}}}, settings)
        assert refused.value.setting == "GPUFLOW_ALLOW_BUCKETS"


def test_a_destination_in_the_results_of_others() -> None:
    settings = Settings(store_url=STORE, allow_buckets=("*",))
    with pytest.raises(NotAllowed, match="fleet's store"):
        destination_store({"output": {"destination": {"type": "s3", "url": f"{STORE}/victim"}}}, settings)


def test_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="GPUFLOW_ALLOW_BUCKETS"):
        Settings.load(env={"GPUFLOW_ALLOW_BUCKETS": "s3://models"})
    for given, kept in ((Settings(), "*"), (Settings.load(env={"GPUFLOW_ALLOW_BUCKETS": "a,b"}), "a,b")):
        own = process_environment(given, "redis://h:1/0", {}, tmp_path, own_broker=True)
        assert own["GPUFLOW_ALLOW_BUCKETS"] == kept
    assert "GPUFLOW_ALLOW_BUCKETS" not in process_environment(Settings(), "redis://h:1/0", {}, tmp_path)
