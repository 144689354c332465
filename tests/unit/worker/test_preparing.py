"""The preparation of an attempt stops when it is told to, whatever its work does."""

from __future__ import annotations

import threading

import pytest

from gpuflow.worker.preparation import PreparationTimeout, Preparing, Stopped


def preparing(**limits: float) -> Preparing:
    return Preparing(deadline_seconds=limits.get("deadline"), most_seconds=limits.get("most", 60.0))


def test_it_gives_what_its_work_gives_and_raises_what_it_raises() -> None:
    assert preparing().run(lambda: 7, "it") == 7

    def broken() -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        preparing().run(broken, "it")


@pytest.mark.parametrize("reason", ["cancelled", "preempted", "lost"])
def test_an_order_ends_the_wait_and_not_the_work(reason: str) -> None:
    never = threading.Event()
    it = preparing()
    threading.Timer(0.05, lambda: it.stop(reason)).start()  # type: ignore[arg-type]

    with pytest.raises(Stopped) as stopped:
        it.run(never.wait, "it")

    assert stopped.value.reason == it.reason == reason
    never.set()


def test_the_first_order_counts_but_for_the_loss_of_the_lease() -> None:
    it = preparing()
    for reason in ("cancelled", "preempted"):
        it.stop(reason)  # type: ignore[arg-type]
    assert it.reason == "cancelled"
    it.stop("lost")
    assert it.reason == "lost"
    with pytest.raises(Stopped, match="lost"):
        it.run(lambda: 7, "it")


def test_its_limits() -> None:
    never = threading.Event()
    with pytest.raises(Stopped, match="timeout"):
        preparing(deadline=0.01).run(never.wait, "it")
    with pytest.raises(PreparationTimeout, match=r"the inputs has not come in 0.01 s \(GPUFLOW_PREPARE_SEC\)"):
        preparing(most=0.01).run(never.wait, "the inputs")
    never.set()
