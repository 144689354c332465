"""A task exchanges files and folders for links while the worker stores what is in them: it gets no file of others.

Each exchange happens at a given step of the worker, so that the race is lost every time where it can be lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts import local_store
from gpuflow.artifacts.destination import UploadFailed, upload_attempt
from gpuflow.artifacts.held_files import MAX_DEPTH, aside, forget_held, hold_files, hold_tree
from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.manifest import digests_in, seal_results
from gpuflow.artifacts.source_file import open_source
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.merge.folders import link_results
from gpuflow.protocol import CHECKPOINT_MARKER
from gpuflow.secrets import Redactor
from gpuflow.worker.checkpoint_uploads import CheckpointUploads
from gpuflow.worker.child_user import ChildUser, files_as
from gpuflow.worker.results_folder import ResultsFolder
from gpuflow.worker.secret_sources import scrub
from tests.support.users import made_user, need_root

#: Longest that a step which must not wait for anybody may take, in seconds.
_MOST_SECONDS = 60
SECRET = b"a secret of the worker"
TASK = "task-1"


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    """End the block with a failure where it takes too long: a call that waits for a pipe is interrupted."""

    def over(*_: Any) -> None:
        raise AssertionError(what)

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder with files of the worker that are called like those of the checkpoint."""
    folder = tmp_path / "worker"
    parts = [f"sub/part-{number}.bin" for number in range(12)]
    for name in ("model-0.bin", *parts, "checkpoint-1/model-0.bin", CHECKPOINT_MARKER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SECRET)
    return folder


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """The folder of an attempt that has saved a checkpoint."""
    checkpoint = tmp_path / TASK / "attempt-1" / "checkpoints" / "checkpoint-1"
    (checkpoint / "sub").mkdir(parents=True)
    for number in range(12):
        (checkpoint / f"model-{number}.bin").write_bytes(b"weights")
        (checkpoint / "sub" / f"part-{number}.bin").write_bytes(b"more weights")
    (checkpoint / CHECKPOINT_MARKER).write_text('{"step": 1}')
    return tmp_path / TASK / "attempt-1"


def store_of(folder: Path) -> LocalStore:
    return LocalStore(folder, throttle=Throttle(None))


def uploads_of(store: Any, attempt: Path, told: list[str]) -> CheckpointUploads:
    return CheckpointUploads(
        store,
        attempt / "checkpoints",
        within=attempt.parent,
        task_id=TASK,
        attempt=1,
        wanted=lambda: True,
        tell=told.append,
    )


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def exchange(path: Path, leads_to: Path) -> None:
    path.rename(path.with_name(f"{path.name}.moved"))
    path.symlink_to(leads_to)


class Exchanging(LocalStore):
    """A store: before it takes a file, the task puts links to the worker's files into all places that it may change."""

    def __init__(self, root: Path, attempt: Path, secret: Path) -> None:
        super().__init__(root, throttle=Throttle(None))
        self._attempt, self._secret = attempt, secret
        self._one_at_a_time = threading.Lock()

    def put(self, source: Path, name: str, **options: Any) -> Any:
        with self._one_at_a_time:
            for path in [path for path in self._attempt.rglob("*") if path.is_file() and not path.is_symlink()]:
                path.unlink()
                path.symlink_to(self._secret / "model-0.bin")
        return super().put(source, name, **options)


def before_link(monkeypatch: pytest.MonkeyPatch, entry: str, action: Callable[[], None]) -> None:
    """Let something happen once, just before the worker makes a hard link of `entry`."""
    real, left = os.link, [action]

    def link(source: Any, target: Any, **options: Any) -> None:
        if Path(source).name == entry and left:
            left.pop()()
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)


def finished(uploads: CheckpointUploads) -> None:
    uploads.start()
    uploads.finish(upload=True)
    assert not uploads.is_alive()


def test_a_checkpoint_whose_files_become_links_while_it_is_uploaded(
    tmp_path: Path, attempt: Path, secret: Path
) -> None:
    told: list[str] = []

    finished(uploads_of(Exchanging(tmp_path / "store", attempt, secret), attempt, told))

    assert told == ["checkpoint-1 is stored: another machine can go on from it"]
    assert SECRET not in contents(tmp_path / "store")
    assert {b"weights", b"more weights"} <= contents(tmp_path / "store")


def test_a_folder_that_becomes_a_link_before_its_files_are_held(
    tmp_path: Path, attempt: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = attempt / "checkpoints" / "checkpoint-1" / "sub"
    before_link(monkeypatch, "part-1.bin", lambda: exchange(sub, secret / "sub"))

    finished(uploads_of(store_of(tmp_path / "store"), attempt, []))

    assert sub.is_symlink(), "it was exchanged in time"
    assert SECRET not in contents(tmp_path / "store")


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/checkpoint-1"])
def test_a_folder_that_is_a_link_when_it_is_opened(tmp_path: Path, attempt: Path, secret: Path, place: str) -> None:
    exchange(attempt / place, secret if place == "checkpoints" else secret / "checkpoint-1")

    with pytest.raises((ArtifactError, FileNotFoundError)):
        hold_tree(attempt.parent, ("attempt-1", "checkpoints", "checkpoint-1"), tmp_path / "held")

    assert SECRET not in contents(tmp_path / "held")


@pytest.mark.parametrize("becomes", ["link", "another file"])
def test_a_file_that_is_exchanged_before_it_is_held(
    tmp_path: Path, attempt: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    file = attempt / "checkpoints" / "checkpoint-1" / "sub" / "part-1.bin"

    def change() -> None:
        file.unlink()
        if becomes == "link":
            file.symlink_to(secret / "model-0.bin")
        else:
            shutil.copyfile(secret / "model-0.bin", file)

    before_link(monkeypatch, "part-1.bin", change)

    with pytest.raises(ArtifactError, match="was exchanged"):
        hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held")

    assert SECRET not in contents(tmp_path / "held")


@pytest.mark.parametrize("leads", ["../../../../worker/model-0.bin", "{secret}/model-0.bin", "{secret}", "sub", "self"])
def test_a_link_out_of_the_checkpoint_or_to_a_folder(tmp_path: Path, attempt: Path, secret: Path, leads: str) -> None:
    (attempt / "checkpoints" / "checkpoint-1" / "self").symlink_to(leads.format(secret=secret))

    with pytest.raises(ArtifactError, match="is a link"):
        hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held")


def test_a_link_to_a_file_of_the_checkpoint_is_that_file(tmp_path: Path, attempt: Path) -> None:
    checkpoint = attempt / "checkpoints" / "checkpoint-1"
    (checkpoint / "sub" / "latest").symlink_to("../newest")
    (checkpoint / "newest").symlink_to("model-3.bin")
    (checkpoint / "absolute").symlink_to(checkpoint / "sub" / "part-2.bin")

    hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held")

    held = tmp_path / "held"
    assert not [path for path in held.rglob("*") if path.is_symlink()]
    assert (held / "sub" / "latest").read_bytes() == (held / "newest").read_bytes() == b"weights"
    assert (held / "absolute").read_bytes() == b"more weights"


def test_a_pipe_holds_nobody_up(tmp_path: Path, attempt: Path) -> None:
    os.mkfifo(attempt / "checkpoints" / "checkpoint-1" / "model-0.bin.fifo")

    with pytest.raises(ArtifactError, match="no plain file"):
        hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held")


def test_folders_without_end_take_no_descriptors(tmp_path: Path, attempt: Path) -> None:
    (attempt / "checkpoints" / "checkpoint-1" / "/".join(["d"] * (MAX_DEPTH + 1))).mkdir(parents=True)

    with pytest.raises(ArtifactError, match="deep"):
        hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held")


def test_results_whose_folder_becomes_a_link_after_they_were_sealed(
    tmp_path: Path, attempt: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (attempt / "sub").mkdir()
    (attempt / "sub" / "part-1.bin").write_bytes(b"a result")
    (attempt / "manifest.json").write_text("{}")
    before_link(monkeypatch, "part-1.bin", lambda: exchange(attempt / "sub", secret / "sub"))

    hold_files(attempt.parent, ("attempt-1",), ["sub/part-1.bin", "manifest.json"], tmp_path / "held")
    upload_attempt(
        Exchanging(tmp_path / "store", attempt, secret),
        tmp_path / "held",
        TASK,
        1,
        ["sub/part-1.bin", "manifest.json"],
    )

    assert contents(tmp_path / "store") == {b"a result", b"{}"}


def test_results_that_are_written_to_after_they_were_sealed(tmp_path: Path, attempt: Path) -> None:
    (attempt / "answer.txt").write_text("sealed")
    sealed = seal_results(attempt, {"a": 1}, [], {})
    (attempt / "answer.txt").write_text("changed")
    names = [*sealed.names, "manifest.json"]
    hold_files(attempt.parent, ("attempt-1",), names, tmp_path / "held")
    digests = digests_in(tmp_path / "held" / "manifest.json")

    with pytest.raises(UploadFailed, match=r"answer\.txt was written to after the results were sealed"):
        upload_attempt(store_of(tmp_path / "store"), tmp_path / "held", TASK, 1, sealed.names, digests)

    assert not list(tmp_path.glob("store/**/manifest.json")), "nobody takes it for whole"


def test_pipes_among_the_results_hold_up_nobody(attempt: Path) -> None:
    (attempt / "answer.txt").write_text("an answer")
    for name in ("pipe", "sub.txt"):
        os.mkfifo(attempt / name)

    with deadline("what waits for a pipe waits for ever"):
        scrub(attempt, Redactor(["12345678"]))
        sealed = seal_results(attempt, {"a": 1}, ["pipe"], {})

    assert "answer.txt" in sealed.names and not {"pipe", "sub.txt"} & set(sealed.names)
    assert sealed.result["missing_artifacts"] == ["pipe"]
    (attempt / "responses.json").unlink()
    os.mkfifo(attempt / "responses.json")
    with deadline("the same of its own file"), pytest.raises(ArtifactError, match=r"responses\.json.*no file"):
        seal_results(attempt, {"a": 1}, [], {})


def test_results_of_a_call_whose_folder_becomes_a_link(
    tmp_path: Path, attempt: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers of merged calls get hard links to the files that a session has left, while the session lives on."""
    (attempt / "sub").mkdir()
    (attempt / "sub" / "part-1.bin").write_bytes(b"a result")
    (attempt / "link").symlink_to(secret)
    (attempt / ".own").write_bytes(b"no result")
    before_link(monkeypatch, "part-1.bin", lambda: exchange(attempt / "sub", secret / "sub"))

    folder = link_results(tmp_path, TASK, 1, "d", "caller", single=True)

    assert folder == tmp_path / "caller" / "attempt-1"
    assert contents(folder) == {b"a result"}


def test_names_of_the_folder_are_not_taken_by_a_result(tmp_path: Path, attempt: Path) -> None:
    for name in ("attempt-7", "fetched", ".gpuflow-held-1-x", "notes"):
        (attempt / name).mkdir()

    ResultsFolder(tmp_path, TASK).publish(1)

    assert {path.name for path in attempt.parent.iterdir()} == {"attempt-1", "checkpoints", "notes"}


def test_results_that_are_links_when_they_are_held(tmp_path: Path, attempt: Path, secret: Path) -> None:
    (attempt / "sub").symlink_to(secret / "sub")

    with pytest.raises(ArtifactError, match="is a link"):
        hold_files(attempt.parent, ("attempt-1",), ["sub/part-1.bin"], tmp_path / "held")


def test_a_result_that_is_gone(tmp_path: Path, attempt: Path) -> None:
    with pytest.raises(ArtifactError, match="was removed"):
        hold_files(attempt.parent, ("attempt-1",), ["sub/gone.bin"], tmp_path / "held")


def test_a_store_opens_no_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "link").symlink_to(secret / "model-0.bin")

    with pytest.raises(ArtifactError, match="is a link"), open_source(tmp_path / "link"):
        pass
    with pytest.raises(ArtifactError, match="is a link"):
        store_of(tmp_path / "store").put(tmp_path / "link", "task-1/a")


def test_a_destination_whose_folder_becomes_a_link(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of results that tasks may write to as well."""
    real, left = local_store.PartFile, [lambda: exchange(tmp_path / "store" / TASK, tmp_path / "elsewhere")]
    for folder in (tmp_path / "elsewhere", tmp_path / "store" / TASK):
        (folder / "attempt-1").mkdir(parents=True)

    def part(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return real(*arguments, **options)

    monkeypatch.setattr(local_store, "PartFile", part)

    store_of(tmp_path / "store").put(secret / "model-0.bin", f"{TASK}/attempt-1/a.bin")

    assert (tmp_path / "store" / TASK).is_symlink(), "it was exchanged in time"
    assert list((tmp_path / "elsewhere").rglob("*.bin")) == []


def test_what_a_killed_worker_has_held_goes_with_the_next_attempt(tmp_path: Path) -> None:
    with aside(tmp_path, 1) as first, aside(tmp_path, 2) as second:
        (first / "file").write_bytes(b"weights")

        forget_held(tmp_path, below=2)

        assert not first.exists()
        assert second.exists()
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def child() -> Iterator[ChildUser]:
    with made_user() as user:
        yield ChildUser(name=user.name, uid=user.uid, gid=user.gid, groups=(user.gid,), home="/nonexistent")


def test_a_file_of_root_that_the_task_has_linked_into_its_checkpoint(tmp_path: Path, attempt: Path) -> None:
    """Where fs.protected_hardlinks is 0, a user makes hard links of files that he may not read."""
    need_root()
    tmp_path.chmod(0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "shadow").write_bytes(SECRET)
    (tmp_path / "shadow").chmod(0o600)
    with child() as user:
        user.own(attempt)
        os.link(tmp_path / "shadow", attempt / "checkpoints" / "checkpoint-1" / "a.bin")

        with pytest.raises(PermissionError):
            hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "held", rights=lambda: files_as(user))

        (attempt / "checkpoints" / "checkpoint-1" / "a.bin").unlink()
        hold_tree(attempt, ("checkpoints", "checkpoint-1"), tmp_path / "second", rights=lambda: files_as(user))
        assert contents(tmp_path / "second") == {b"weights", b"more weights", b'{"step": 1}'}


def test_rights_of_another_user_are_without_the_groups_of_root(tmp_path: Path) -> None:
    need_root()
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    file = tmp_path / "of-a-group"
    file.write_bytes(SECRET)
    before = os.getgroups()
    os.setgroups([*before, 12345])
    os.chown(file, 0, 12345)
    file.chmod(0o640)
    try:
        with child() as user:
            with files_as(user), pytest.raises(PermissionError):
                file.read_bytes()
            assert file.read_bytes() == SECRET, "the thread has its own rights again"
            assert 12345 in os.getgroups()
            with files_as(user):
                with files_as(user):
                    pass
                with pytest.raises(PermissionError):
                    file.read_bytes()
            with files_as(ChildUser(name="x", uid=user.uid, gid=user.gid, groups=(user.gid, 12345), home="/")):
                assert file.read_bytes() == SECRET, "its own groups count"
    finally:
        os.setgroups(before)
