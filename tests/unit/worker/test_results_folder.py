"""The results folder of a task: which checkpoint the next attempt goes on from, and what of it is not kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER
from gpuflow.worker.child_environment import given_variables
from gpuflow.worker.results_folder import ResultsFolder


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    return ResultsFolder(tmp_path / "results", "task-1")


def checkpoint(parent: Path, step: int, *, complete: bool = True) -> Path:
    path = parent / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.bin").write_bytes(b"weights")
    if complete:
        (path / CHECKPOINT_MARKER).write_text("{}")
    return path


def test_without_a_folder_there_is_nothing_to_resume(folder):
    assert folder.resume_from(1) is None
    assert folder.next_attempt() == 1


def test_the_highest_step_counts_and_not_the_name(folder):
    checkpoint(folder.checkpoint_dir(1), 9)
    best = checkpoint(folder.checkpoint_dir(1), 10)

    assert folder.resume_from(2) == best


def test_half_a_checkpoint_is_passed_over(folder):
    whole = checkpoint(folder.checkpoint_dir(1), 4)
    checkpoint(folder.checkpoint_dir(1), 8, complete=False)
    (checkpoint(folder.checkpoint_dir(1), 9, complete=False) / CHECKPOINT_MARKER).mkdir()

    assert folder.resume_from(2) == whole


def test_an_attempt_without_a_checkpoint_is_skipped(folder):
    first = checkpoint(folder.checkpoint_dir(1), 4)
    folder.create_attempt(2)
    checkpoint(folder.checkpoint_dir(3), 8, complete=False)

    assert folder.resume_from(4) == first


def test_the_newest_attempt_goes_before_a_higher_step(folder):
    checkpoint(folder.checkpoint_dir(2), 30)
    newest = checkpoint(folder.checkpoint_dir(10), 20)

    assert folder.resume_from(11) == newest


def test_only_earlier_attempts_count(folder):
    first = checkpoint(folder.checkpoint_dir(1), 4)
    checkpoint(folder.checkpoint_dir(2), 8)
    checkpoint(folder.checkpoint_dir(3), 12)

    assert folder.resume_from(2) == first
    assert folder.resume_from(1) is None


@pytest.mark.parametrize("name", ["checkpoint-", "checkpoint-x", "xcheckpoint-9", "checkpoint-9.old", ".checkpoint-9"])
def test_other_names_are_no_checkpoints(folder, name):
    path = checkpoint(folder.checkpoint_dir(1), 9)
    path.rename(path.with_name(name))

    assert folder.resume_from(2) is None


def test_a_file_where_the_checkpoints_belong_is_no_checkpoint(folder):
    folder.create_attempt(1)
    folder.checkpoint_dir(1).write_text("")

    assert folder.resume_from(2) is None


def test_links_out_of_the_folder_are_refused(folder, tmp_path):
    elsewhere = checkpoint(tmp_path / "elsewhere", 50)
    first = checkpoint(folder.checkpoint_dir(1), 1)
    checkpoint(folder.checkpoint_dir(2), 2)
    (folder.checkpoint_dir(2) / "checkpoint-50").symlink_to(elsewhere)  # the checkpoint
    (folder.checkpoint_dir(2) / "checkpoint-2" / "optimizer.pt").symlink_to(elsewhere / "model.bin")  # a file of it
    folder.create_attempt(3)
    folder.checkpoint_dir(3).symlink_to(elsewhere.parent)  # the folder of checkpoints
    folder.attempt_dir(4).symlink_to(elsewhere.parent)  # the attempt
    (elsewhere.parent / "checkpoints").symlink_to(elsewhere.parent)
    half = checkpoint(folder.checkpoint_dir(5), 5, complete=False)
    (half / CHECKPOINT_MARKER).symlink_to(elsewhere / CHECKPOINT_MARKER)  # the marker

    assert folder.resume_from(6) == first


def test_a_link_within_the_folder_is_followed(folder):
    whole = checkpoint(folder.checkpoint_dir(1), 4)
    (whole / "same.bin").symlink_to("model.bin")

    assert folder.resume_from(2) == whole


def test_a_results_folder_behind_a_link_is_as_good(folder, tmp_path):
    checkpoint(folder.checkpoint_dir(1), 4)
    (tmp_path / "link").symlink_to(tmp_path / "results")

    there = ResultsFolder(tmp_path / "link", "task-1")

    assert there.resume_from(2) == there.checkpoint_dir(1) / "checkpoint-4"


def test_an_id_that_leads_out_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="cannot name a folder"):
        ResultsFolder(tmp_path, "../other")


@pytest.mark.parametrize(("seconds", "expected"), [(None, None), (90, "90"), (2.5, "2.5")])
def test_the_child_learns_how_long_a_notice_is(tmp_path, seconds, expected):
    variables = given_variables(
        task_id="t", attempt=2, gpus=(), output_dir=tmp_path, checkpoint_dir=tmp_path, resume_from="/r", model=None,
        results_dir=tmp_path, python_path=None, notice_seconds=seconds,
    )  # fmt: skip

    assert variables.get("NOTICE_SECONDS") == expected
    assert variables["RESUME_FROM"] == "/r"


def test_an_attempt_that_has_left_nothing_has_no_folder(folder: ResultsFolder) -> None:
    folder.create_attempt(1)
    folder.log_path(1).touch()

    assert folder.forget_empty(1)

    assert not folder.root.exists()


def test_the_folders_of_other_attempts_stay(folder: ResultsFolder) -> None:
    folder.create_attempt(1)
    folder.log_path(1).write_text("it failed\n")
    folder.create_attempt(2)  # without a log, too

    assert folder.forget_empty(2)

    assert [path.name for path in folder.root.iterdir()] == ["attempt-1"]


@pytest.mark.parametrize(
    "name", ["answer.txt", "logs/executor.log", "logs/other.log", ".hidden", "sub/x", "checkpoints/x"]
)
def test_what_an_attempt_has_left_is_kept(folder: ResultsFolder, name: str) -> None:
    left = folder.create_attempt(1) / name
    left.parent.mkdir(exist_ok=True)
    left.write_text("a word")

    assert not folder.forget_empty(1)

    assert left.read_text() == "a word"


def test_a_link_in_the_place_of_its_logs_leads_nowhere(folder: ResultsFolder, tmp_path: Path) -> None:
    (tmp_path / "executor.log").touch()
    path = folder.create_attempt(1)
    (path / "logs").rmdir()
    (path / "logs").symlink_to(tmp_path)

    assert not folder.forget_empty(1)

    assert (tmp_path / "executor.log").exists()
