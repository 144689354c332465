"""The GPU locks in one process: all or nothing, slices and their parents, shares, and a directory that goes away."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.fleet.gpu_locks import GpuLocks, Hold

PARENTS = {"MIG-0": "GPU-9", "MIG-1": "GPU-9"}
CAPACITY = {"GPU-0": 10_000, "GPU-1": 10_000, "GPU-9": 10_000, "MIG-0": 4000}


@pytest.fixture
def ledger(tmp_path: Path) -> GpuLocks:
    return GpuLocks(tmp_path / "locks")


def taken(hold: Hold | None) -> Hold:
    assert hold is not None
    return hold


def test_all_or_nothing(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["GPU-1"])):
        assert ledger.claim(["GPU-0", "GPU-1", "GPU-2"]) is None
        assert ledger.free(["GPU-2", "GPU-1", "GPU-0"]) == ("GPU-2", "GPU-0")
        with taken(ledger.claim(["GPU-2", "GPU-0"])) as two:
            assert two.uuids == ("GPU-2", "GPU-0")
            assert ledger.free(["GPU-0", "GPU-1", "GPU-2"]) == ()
    assert ledger.free(["GPU-0", "GPU-1", "GPU-2"]) == ("GPU-0", "GPU-1", "GPU-2")


def test_a_refused_take_leaves_no_file_open(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["GPU-9"])):
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert ledger.claim(["GPU-0", "GPU-1", "GPU-9"]) is None
        assert ledger.claim(["GPU-0", "GPU-9"], share_mib=10, capacity_mib=CAPACITY) is None
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_descriptors_are_not_inherited(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["GPU-0", "MIG-0"], parents=PARENTS)) as hold:
        assert len(hold.fds) == 4  # the GPU, the slice, its parent, the directory
        assert not any(os.get_inheritable(descriptor) for descriptor in hold.fds)


def test_closing_twice_closes_nothing_of_others(ledger: GpuLocks) -> None:
    hold = taken(ledger.claim(["GPU-0"]))
    hold.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    assert set(others) & set(hold.fds)
    hold.close()
    assert hold.closed
    for descriptor in others:
        os.close(descriptor)


def test_slices_and_their_parent_keep_each_other_out(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["MIG-0"], parents=PARENTS)):
        assert ledger.claim(["GPU-9"], parents=PARENTS) is None
        assert ledger.claim(["MIG-0"], parents=PARENTS) is None
        assert ledger.free(["GPU-9", "MIG-0", "MIG-1"], parents=PARENTS) == ("MIG-1",)
        taken(ledger.claim(["MIG-1"], parents=PARENTS)).close()
    with taken(ledger.claim(["GPU-9"], parents=PARENTS)):
        assert ledger.free(["GPU-9", "MIG-0", "MIG-1"], parents=PARENTS) == ()
    taken(ledger.claim(["MIG-1", "MIG-0"], parents=PARENTS)).close()
    assert ledger.claim(["GPU-9", "MIG-0"], parents=PARENTS) is None


def test_shares_fill_a_gpu_and_keep_others_out(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["GPU-0"], share_mib=6000, capacity_mib=CAPACITY)) as first:
        assert ledger.claim(["GPU-0"]) is None
        assert ledger.claim(["GPU-0"], share_mib=4001, capacity_mib=CAPACITY) is None
        with taken(ledger.claim(["GPU-0"], share_mib=4000, capacity_mib=CAPACITY)):
            assert ledger.room(CAPACITY)["GPU-0"] == 0
            seen = ledger.survey(["GPU-0"])["GPU-0"]
            assert (seen.whole, seen.shareable, seen.promised_mib) == (False, True, 10_000)
        first.close()
        assert ledger.free(["GPU-0"]) == ("GPU-0",)
    with taken(ledger.claim(["GPU-0"])):
        assert ledger.claim(["GPU-0"], share_mib=1, capacity_mib=CAPACITY) is None
        assert ledger.room(CAPACITY)["GPU-0"] == 0


def test_shares_of_a_gpu_and_its_slices_keep_each_other_out(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["GPU-9"], share_mib=100, capacity_mib=CAPACITY)):
        assert ledger.claim(["MIG-0"], parents=PARENTS) is None
        assert ledger.free(["MIG-0"], parents=PARENTS) == ()
    with taken(ledger.claim(["MIG-0"], parents=PARENTS)):
        assert ledger.claim(["GPU-9"], share_mib=100, capacity_mib=CAPACITY) is None
    with taken(ledger.claim(["MIG-0"], parents=PARENTS, share_mib=3000, capacity_mib=CAPACITY)):
        assert ledger.room({"MIG-0": 4000}, parents=PARENTS) == {"MIG-0": 1000}
        assert ledger.claim(["MIG-0"], parents=PARENTS) is None


def test_files_of_dead_shares_count_nothing_and_go(ledger: GpuLocks) -> None:
    dead = ledger.directory.path / "share-GPU-0-0123456789abcdef-9999.lock"
    dead.touch(0o666)
    foreign = ledger.directory.path / "share-GPU-0-what.lock"
    foreign.touch()
    assert ledger.room(CAPACITY)["GPU-0"] == 10_000
    assert not dead.exists()
    assert foreign.exists()


@pytest.mark.parametrize("uuid", ["", "../x", "GPU 0", "GPU-0\n", "a/b", "-x", ".", "x" * 101, "GPU_0", "GPU-ü"])
def test_what_is_no_uuid_is_refused(ledger: GpuLocks, uuid: str) -> None:
    for call in (ledger.claim, ledger.free):
        with pytest.raises(GPUFlowError, match="not the UUID"):
            call([uuid])


def test_the_slices_of_older_drivers_have_slashes(ledger: GpuLocks) -> None:
    with taken(ledger.claim(["MIG-GPU-1/5/0"], parents={"MIG-GPU-1/5/0": "GPU-1"})):
        assert ledger.free(["MIG-GPU-1/5/0", "MIG-GPU-1/5/1", "GPU-1"]) == ("MIG-GPU-1/5/1",)


def test_senseless_asks_are_refused(ledger: GpuLocks) -> None:
    with pytest.raises(GPUFlowError, match="named twice"):
        ledger.claim(["GPU-0", "GPU-0"])
    for mib, capacity in ((0, CAPACITY), (-1, CAPACITY), (5, None)):
        with pytest.raises(GPUFlowError, match="share"):
            ledger.claim(["GPU-0"], share_mib=mib, capacity_mib=capacity)


def test_no_gpu_is_always_free(ledger: GpuLocks) -> None:
    with ledger.locked():
        assert taken(ledger.claim([])).fds == ()


def test_threads_take_in_turns(ledger: GpuLocks) -> None:
    inside, worst, got = [0], [0], [0]
    lock = threading.Lock()

    def work() -> None:
        for _ in range(50):
            hold = ledger.claim(["GPU-0", "GPU-1"])
            if hold is None:
                continue
            with lock:
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                got[0] += 1
            with lock:
                inside[0] -= 1
            hold.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1]
    assert got[0] >= 50


def test_a_directory_that_goes_away_under_a_hold_stops_everything(ledger: GpuLocks) -> None:
    hold = taken(ledger.claim(["GPU-0"]))
    shutil.rmtree(ledger.directory.path)
    for call in (ledger.claim, ledger.free):
        with pytest.raises(GPUFlowError, match=r"removed or replaced while GPUs are held.*GPUFLOW_LOCK_DIR"):
            call(["GPU-1"])
    hold.close()
    assert ledger.free(["GPU-0", "GPU-1"]) == ("GPU-0", "GPU-1")
    assert ledger.directory.path.is_dir()
