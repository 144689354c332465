"""The size limit of the model cache: what goes, in which order, and what stays whatever its size."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.base import ExecutorError
from executors.cache import Holds, hold, hold_inputs, lock_name, lock_path, obtain, unused
from executors.cache_trim import Entry, entries, evictions, remove, trim
from gpuflow.protocol import Emitter, Request
from tests.fixtures.executor_child import ROOT, Child

NOW = 1_000_000.0


def entry(name: str, size: int, used: float, *, kind: str = "models", in_use: bool = False) -> Entry:
    return Entry(kind=kind, name=name, path=Path("/c") / kind / name, size_bytes=size, used_at=used, in_use=in_use)


@pytest.mark.parametrize(
    ("present", "limit", "gone"),
    [
        pytest.param([], 0, [], id="nothing there"),
        pytest.param([entry("a", 5, 1), entry("b", 5, 2)], 10, [], id="exactly full"),
        pytest.param([entry("b", 5, 2), entry("a", 5, 1)], 9, ["a"], id="the oldest goes, and only it"),
        pytest.param([entry("a", 1, 1), entry("b", 9, 2), entry("c", 5, 3)], 5, ["a", "b"], id="as many as it takes"),
        pytest.param([entry("a", 5, 1, in_use=True), entry("b", 5, 2)], 5, ["b"], id="what is in use stays"),
        pytest.param([entry("a", 5, 1, in_use=True)], 1, [], id="all in use: over the limit"),
        pytest.param([entry("a", 50, 1)], 10, ["a"], id="one that is larger than the limit"),
        pytest.param([entry("z", 5, 1), entry("y", 5, 1)], 5, ["y"], id="the same age: by name"),
        pytest.param([entry("d", 5, NOW - 60, kind="checkpoints"), entry("m", 5, NOW)], 5, ["m"], id="just brought"),
        pytest.param(
            [entry("d", 5, NOW - 6000, kind="checkpoints"), entry("m", 5, NOW)], 5, ["d"], id="brought before"
        ),
        pytest.param([entry("h", 5, 1, kind="hub"), entry("m", 5, 2)], 5, ["h"], id="models of the hub count as any"),
    ],
)
def test_what_was_used_longest_ago_goes_first(present: list[Entry], limit: int, gone: list[str]) -> None:
    assert [one.name for one in evictions(present, limit, now=NOW)] == gone


def test_what_is_to_be_kept_stays() -> None:
    present = [entry("a", 5, 1), entry("b", 5, 2)]

    assert [one.name for one in evictions(present, 5, now=NOW, keep={"models/a"})] == ["b"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three models of 1 kB, used one after the other, and a folder that is none of the cache's business."""
    for number, name in enumerate(("old", "middle", "new")):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 1000)
        os.utime(folder, (number + 1, number + 1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_bytes(b"x" * 5000)
    return tmp_path


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_trim_removes_whole_entries_and_says_so(cache: Path) -> None:
    told: list[str] = []

    removed = trim(cache, 1500, tell=told.append)

    assert [one.name for one in removed] == ["old", "middle"]
    assert names(cache) == ["new"]
    assert len(told) == 2 and "models/old" in told[0]
    assert (cache / "mine" / "notes").exists()


def test_use_makes_an_entry_young(cache: Path) -> None:
    holds = Holds()
    hold(cache, "models-old", holds=holds)
    holds.release()

    trim(cache, 2000)

    assert names(cache) == ["new", "old"]


def test_what_is_held_stays_and_the_limit_is_said_to_be_passed(cache: Path) -> None:
    told: list[str] = []
    holds = Holds()
    for name in ("old", "new"):
        hold(cache, f"models-{name}", holds=holds)

    trim(cache, 500, tell=told.append)

    assert names(cache) == ["new", "old"]
    assert "GPUFLOW_MODEL_CACHE_MAX_BYTES" in told[-1]
    holds.release()
    trim(cache, 500)
    assert names(cache) == []


def test_an_entry_that_is_taken_between_listing_and_removal_stays(cache: Path) -> None:
    (old,) = (one for one in entries(cache) if one.name == "old")
    holds = Holds()
    hold(cache, "models-old", holds=holds)

    assert not remove(cache, old)

    assert "old" in names(cache)
    holds.release()


def test_links_are_neither_followed_nor_removed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "weights").write_bytes(b"x" * 10_000)
    (cache / "models" / "link").symlink_to(outside)
    (cache / "models" / "new" / "out").symlink_to(outside)

    trim(cache, 0)

    assert names(cache) == ["link"]
    assert (outside / "weights").exists()


def test_a_removal_that_broke_off_is_finished(cache: Path) -> None:
    (cache / "models" / "old").rename(cache / "models" / ".evicted-1-old")

    trim(cache, 10_000)

    assert names(cache) == ["middle", "new"]


def test_two_that_want_one_entry_make_it_once_and_it_is_held(tmp_path: Path) -> None:
    made: list[int] = []
    path = tmp_path / "models" / "entry"

    def make() -> None:
        made.append(1)
        path.mkdir(parents=True)

    threads = [threading.Thread(target=obtain, args=(path, make, Emitter(io.StringIO()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert [thread.is_alive() for thread in threads] == [False, False]
    assert made == [1]
    with unused(tmp_path, lock_name(path)) as free:
        assert not free


def test_inputs_that_lie_in_the_cache_are_held(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "abc" / "final_lora"
    folder.mkdir(parents=True)
    spec = {"model": {"adapters": [{"path": str(folder)}]}, "data": {"path": "/elsewhere"}}
    request = Request(task_id="t", task_type="echo", spec=spec, output_dir="o", cache_dir=str(tmp_path))

    first, second = Holds(), Holds()
    for holds in (first, second):
        hold_inputs(request, holds)

    first.release()

    with unused(tmp_path, "checkpoints-abc") as free:
        assert not free
    second.release()
    with unused(tmp_path, "checkpoints-abc") as free:
        assert free


def test_what_is_taken_for_a_request_that_has_ended_is_let_go(tmp_path: Path) -> None:
    holds = Holds()
    holds.release()

    hold(tmp_path, "checkpoints-abc", holds=holds)

    with unused(tmp_path, "checkpoints-abc") as free:
        assert free


def test_a_checkpoint_is_safe_as_long_as_the_child_that_was_given_it_runs(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "checkpoints" / "abc"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    later = time.time() + 7200
    child = start(
        "echo",
        {"taskType": "echo", "echo": {"sleep_seconds": 60}},
        cache_dir=str(tmp_path / "cache"),
        checkpoint_path=str(folder),
    )
    child.until("worker", status="working")

    assert trim(tmp_path / "cache", 10, clock=lambda: later) == []
    child.signal()
    child.end()

    assert [one.name for one in trim(tmp_path / "cache", 10, clock=lambda: later)] == ["abc"]


def test_a_file_that_is_being_fetched_stays(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "key"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl.part").write_bytes(b"x" * 1000)
    os.utime(folder, (1, 1))

    assert trim(tmp_path, 10) == []


def test_an_input_that_has_gone_is_worth_another_attempt(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints" / "gone")
    request = Request(
        task_id="t", task_type="echo", spec={}, output_dir="o", cache_dir=str(tmp_path), checkpoint_path=path
    )

    with pytest.raises(ExecutorError, match="removed from the cache") as told:
        hold_inputs(request)

    assert (told.value.type, told.value.retryable) == ("CacheEntryGone", True)


def test_a_cache_that_may_only_be_read_is_used_without_locks(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("no folder")  # as root, no mode would refuse us

    assert hold(tmp_path, "models-a")
    assert not lock_path(tmp_path, "models-a").exists()


def test_the_program_trims(cache: Path) -> None:
    command = [sys.executable, "-m", "executors.models", "trim", "--max-bytes", "1500", "--cache-dir", str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert names(cache) == ["new"]
    assert "removed models/old" in done.stdout
