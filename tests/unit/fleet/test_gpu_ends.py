"""When GPUs are given back at the latest: said by their holder, known to every process of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.fleet.gpu_locks import GpuLocks, Hold

GPUS = ("GPU-0", "GPU-1", "GPU-2")


@pytest.fixture
def ledger(tmp_path: Path) -> GpuLocks:
    return GpuLocks(tmp_path / "locks")


def take(ledger: GpuLocks, *uuids: str, share_mib: int | None = None) -> Hold:
    hold = ledger.claim(uuids, share_mib=share_mib, capacity_mib=dict.fromkeys(GPUS, 1000))
    assert hold is not None
    return hold


def test_what_a_holder_says_is_known_to_others(ledger: GpuLocks, tmp_path: Path) -> None:
    with take(ledger, "GPU-0", "GPU-1") as hold:
        ledger.note_end(hold, 70.5)

        assert GpuLocks(tmp_path / "locks").ends() == {"GPU-0": 70.5, "GPU-1": 70.5}


def test_the_next_holder_does_not_inherit_it(ledger: GpuLocks) -> None:
    with take(ledger, "GPU-0", "GPU-1") as hold:
        ledger.note_end(hold, 70)

    with take(ledger, "GPU-1", "GPU-2"):
        assert ledger.ends() == {"GPU-0": 70}


def test_a_hold_that_was_given_back_says_nothing_more(ledger: GpuLocks) -> None:
    hold = take(ledger, "GPU-0")
    hold.close()

    ledger.note_end(hold, 70)

    assert ledger.ends() == {}


def test_nobody_can_tell_when_a_shared_gpu_is_free(ledger: GpuLocks) -> None:
    with take(ledger, "GPU-0", share_mib=400) as one, take(ledger, "GPU-0", share_mib=400):
        ledger.note_end(one, 70)

        assert ledger.ends() == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"gpus": {"GPU-0": "soon"}}', b"\xff\x00"])
def test_a_file_that_cannot_be_read_counts_for_nothing(ledger: GpuLocks, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "locks" / "ends.json").write_bytes(content)

    assert ledger.ends() == {}
    with take(ledger, "GPU-0") as hold:
        ledger.note_end(hold, 70)
        assert ledger.ends() == {"GPU-0": 70}
