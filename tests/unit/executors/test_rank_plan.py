"""How many ranks a request comes to, and which failed rank is the cause. Pure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.cores import DECLARED
from executors.distributed.launch import environment
from executors.distributed.plan import RankPlan, plan_ranks, use_gpus
from executors.distributed.processes import Roster
from executors.distributed.records import RankEnd, culprit, failure, is_from_peer, read_end, write_record
from gpuflow.protocol import Request

PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def request(gpus: int, task_type: str = "lora_sft", **training: Any) -> Request:
    uuids = tuple(f"GPU-{index}" for index in range(gpus))
    return Request(task_id="t", task_type=task_type, spec={"training": training}, output_dir="/x", gpus=uuids)


@pytest.mark.parametrize(
    ("gpus", "training", "processes", "used"),
    [
        (0, {}, 1, 0),
        (1, {}, 1, 1),
        (2, {}, 2, 2),
        (4, {"nproc_per_node": None}, 4, 4),
        (4, {"nproc_per_node": 2}, 2, 2),
        (2, {"nproc_per_node": 1}, 1, 1),
        (2, {"allow_multi_gpu": False}, 1, 1),
        (2, {"allow_multi_gpu": False, "nproc_per_node": 1}, 1, 1),
        (0, {"nproc_per_node": 2}, 2, 0),
        (0, {"allow_multi_gpu": True}, 1, 0),
    ],
)
def test_one_rank_for_each_leased_gpu_unless_the_user_says_otherwise(gpus, training, processes, used):
    plan = plan_ranks(request(gpus, **training))

    assert plan == RankPlan(processes=processes, gpus=tuple(f"GPU-{index}" for index in range(used)))


@pytest.mark.parametrize("task_type", ["sft", "lora_sft", "dpo", "ppo", "grpo", "reward"])
def test_every_trainer_has_ranks(task_type):
    assert plan_ranks(request(2, task_type)).processes == 2


@pytest.mark.parametrize("task_type", ["inference", "echo", "acme.own"])
def test_other_tasks_are_one_process_with_all_gpus(task_type):
    assert plan_ranks(request(2, task_type, nproc_per_node=7)) == RankPlan(processes=1, gpus=("GPU-0", "GPU-1"))


@pytest.mark.parametrize(
    ("gpus", "training", "says"),
    [
        (1, {"nproc_per_node": 2}, 'is 2, but the task has 1 GPU; ask for 2 (resources.accelerators: "2")'),
        (2, {"nproc_per_node": 3}, "is 3, but the task has 2 GPUs"),
        (2, {"nproc_per_node": 2, "allow_multi_gpu": False}, "allow_multi_gpu is false; keep one"),
    ],
)
def test_more_ranks_than_gpus_are_refused(gpus, training, says):
    with pytest.raises(ExecutorError) as caught:
        plan_ranks(request(gpus, **training))

    assert (caught.value.type, caught.value.retryable) == ("BadInput", False)
    assert says in caught.value.message


def test_gpus_that_no_rank_uses_are_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1,GPU-2")

    use_gpus(RankPlan(processes=3, gpus=("GPU-0", "GPU-1", "GPU-2")), request(3))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2"
    use_gpus(RankPlan(processes=1, gpus=("GPU-0",)), request(3))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def end(rank: int, exit_code: int, at_ns: int = 0, message: str | None = None, **fields: Any) -> RankEnd:
    error = None if message is None else {"type": "ValueError", "message": message, "retryable": False}
    return RankEnd(rank=rank, pid=100 + rank, exit_code=exit_code, at_ns=at_ns, error=error, **fields)


STOPPED = end(3, 143, stopped=True)


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        # A rank is killed, and the other one speaks first: of a connection that is gone.
        ([end(0, 1, 5, PEER, from_peer=True), end(1, -9)], 1),
        # It is not known as such.
        ([end(0, 1, 5, "what is this"), end(1, -9)], 1),
        ([end(0, 1, 9, PEER, from_peer=True), end(1, 1, 10, "no memory")], 1),
        ([end(0, 1, 9, "first"), end(1, 1, 10, "second")], 0),
        ([end(0, -6), end(1, 1, 10, "the cause of the abort")], 1),
        ([end(0, -15), end(1, 7)], 1),
        ([end(0, 143), STOPPED, end(1, 1, 1, PEER, from_peer=True)], 1),
        ([end(0, 1, 2, PEER, from_peer=True), end(1, 1, 1, PEER, from_peer=True)], 1),
        ([end(0, 1, 2, PEER, from_peer=True), end(1, 3)], 1),
        ([end(0, 0), STOPPED], None),
        ([], None),
    ],
)
def test_the_first_cause_is_the_culprit(ends, rank):
    found = culprit(ends)

    assert (found.rank if found else None) == rank


@pytest.mark.parametrize(
    ("ended", "kind", "says", "retryable"),
    [
        (end(1, -9), "RankKilled", "rank 1 of 2 (process 101) ended with signal SIGKILL (was the machine", True),
        (end(1, -250), "RankKilled", "ended with signal 250; see the log", True),
        (end(0, 3), "RankDied", "rank 0 of 2 (process 100) ended with exit code 3 and gave no error", False),
        (end(0, 75), "RankDied", "exit code 75", True),
        (end(1, 1, 1, "too odd"), "ValueError", "rank 1 of 2: too odd", False),
        (end(0, 1, 1, PEER, from_peer=True), "RankLost", "rank 0 of 2 lost its connection to another rank: [", True),
    ],
)
def test_the_error_names_the_rank(ended, kind, says, retryable):
    error = failure(ended, 2)

    assert (error.type, error.retryable) == (kind, retryable)
    assert says in error.message


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    import json

    path = tmp_path / "rank-1.error.json"
    write_record(path, {"type": "OutOfMemory", "message": "no room", "retryable": True}, from_peer=False)

    content = json.loads(path.read_text())
    read = read_end(1, 42, 1, content)
    assert (read.error, read.from_peer, read.stopped) == (
        {"type": "OutOfMemory", "message": "no room", "retryable": True},
        False,
        False,
    )
    assert read.at_ns > 0
    assert int(content["message"]["extraInfo"]["timestamp"]) == read.at_ns // 10**9  # as torchrun reads it
    assert read_end(1, 42, -9, {"message": "<NONE>"}) == RankEnd(rank=1, pid=42, exit_code=-9)


def test_errors_of_a_lost_connection_are_known():
    class DistBackendError(RuntimeError):
        """As torch names it."""

    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(PEER)

    assert is_from_peer(RuntimeError(PEER))
    assert is_from_peer(DistBackendError("NCCL error"))
    assert is_from_peer(wrapped)
    assert not is_from_peer(ValueError(PEER))
    assert not is_from_peer(RuntimeError("CUDA out of memory"))


def test_a_notice_reaches_ranks_that_run_and_those_that_start_later(tmp_path: Path):
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        roster = Roster(tmp_path)
        roster.enter(0)
        assert seen == []
        (tmp_path / "rank-7.pid").write_text("")  # one that is entering
        roster.give_notice()
        assert len(seen) == 1
        roster.enter(1)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("declared", "set_already", "threads"), [("5", None, "2"), ("0.5", None, "1"), ("8", "3", "3"), ("1.5", "1", "1")]
)
def test_ranks_share_the_cpus_that_the_task_has_declared(
    monkeypatch: pytest.MonkeyPatch, declared: str, set_already: str | None, threads: str
) -> None:
    monkeypatch.setenv(DECLARED, declared)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_already is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_already)

    assert environment(RankPlan(processes=2))["OMP_NUM_THREADS"] == threads
