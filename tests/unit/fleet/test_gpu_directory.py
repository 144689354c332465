"""The lock directory: modes whatever the umask, what is refused, and files that are replaced under a lock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.fleet import gpu_directory
from gpuflow.fleet.gpu_directory import LockDirectory, default_directory, unlock


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LockDirectory]:
    made = LockDirectory(tmp_path / "locks")
    yield made
    made.close()


@pytest.fixture
def closed_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("closed_umask")
def test_everyone_may_use_what_one_has_made(tmp_path: Path) -> None:
    directory = LockDirectory(tmp_path / "new" / "locks")
    for made in (directory.lock("a.lock"), directory.lock_new("b.lock")):
        assert made is not None
        assert not os.get_inheritable(made)
        unlock(made)
    directory.write("c.json", b"{}")
    assert mode(directory.path) == 0o1777
    assert [mode(path) for path in sorted(directory.path.iterdir())] == [0o666] * 3


def test_a_folder_half_made_is_finished(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o1700)
    LockDirectory(tmp_path / "locks")
    assert mode(tmp_path / "locks") == 0o1777


def test_a_folder_of_one_user_alone_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    LockDirectory(tmp_path)
    assert mode(tmp_path) == 0o700


def test_a_folder_where_strangers_may_remove_locks_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(GPUFlowError, match=r"chmod 1777 .*GPUFLOW_LOCK_DIR"):
        LockDirectory(tmp_path)


def test_symbolic_links_are_refused(tmp_path: Path, directory: LockDirectory) -> None:
    (tmp_path / "link").symlink_to(directory.path)
    with pytest.raises(GPUFlowError, match=r"symbolic link.*GPUFLOW_LOCK_DIR"):
        LockDirectory(tmp_path / "link")
    (tmp_path / "target").write_text("precious")
    (directory.path / "a.lock").symlink_to(tmp_path / "target")
    for call in (directory.lock, directory.lock_new, directory.read, lambda name: directory.write(name, b"x")):
        with pytest.raises(GPUFlowError, match=r"a\.lock.*(symbolic link|there already).*GPUFLOW_LOCK_DIR"):
            call("a.lock")
    assert (tmp_path / "target").read_text() == "precious"
    assert mode(tmp_path / "target") != 0o666


def test_what_is_no_plain_file_is_refused(directory: LockDirectory) -> None:
    os.mkfifo(directory.path / "a.lock")
    with pytest.raises(GPUFlowError, match="no plain file"):
        directory.lock("a.lock")
    assert directory.is_held("a.lock")


def test_a_file_or_nothing_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "locks", Path("/proc/no/locks")):
        with pytest.raises(GPUFlowError, match="GPUFLOW_LOCK_DIR"):
            LockDirectory(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOLCK])
def test_a_disk_that_refuses_is_named_with_its_mend(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl if code == errno.ENOLCK else os, "flock" if code == errno.ENOLCK else "link", refuse)
    with pytest.raises(GPUFlowError, match=rf"a\.lock: {os.strerror(code)}; .*GPUFLOW_LOCK_DIR"):
        directory.lock("a.lock")
    monkeypatch.undo()
    assert list(directory.path.iterdir()) == []


def test_a_lock_is_of_one_alone_or_shared(directory: LockDirectory) -> None:
    one = directory.lock("a.lock", shared=True)
    two = directory.lock("a.lock", shared=True)
    assert one is not None
    assert two is not None
    assert directory.lock("a.lock") is None
    unlock(one)
    assert directory.is_held("a.lock")
    unlock(two)
    assert not directory.is_held("a.lock")
    assert not directory.is_held("nothing.lock")


def test_a_file_replaced_between_open_and_lock_is_opened_again(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, replaced = fcntl.flock, []

    def slow(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append((directory.path / "a.lock").unlink())
        real(descriptor, operation)

    first = directory.lock("a.lock")
    assert first is not None
    unlock(first)
    monkeypatch.setattr(fcntl, "flock", slow)
    locked = directory.lock("a.lock")
    assert locked is not None
    assert os.fstat(locked).st_ino == (directory.path / "a.lock").stat().st_ino
    unlock(locked)


def test_a_file_that_somebody_keeps_removing_is_an_error(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_is_at", lambda *_: False)
    with pytest.raises(GPUFlowError, match="keeps removing"):
        directory.lock("a.lock")


def test_the_directory_notices_that_it_was_replaced(directory: LockDirectory, tmp_path: Path) -> None:
    identity = directory.identity()
    assert directory.in_place()
    directory.path.rename(tmp_path / "moved")
    assert not directory.in_place()
    other = LockDirectory(directory.path)
    assert other.identity() != identity
    assert LockDirectory(tmp_path / "moved").identity() == identity


def test_an_unlinked_hold_of_the_mutex_is_over_when_the_block_ends(directory: LockDirectory) -> None:
    with directory.mutex(0) as had:
        assert had
        with directory.mutex(0) as again:
            assert not again
    with directory.mutex(0) as had:
        assert had


def test_the_default_is_the_same_for_all_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, tmp = tmp_path / "run", tmp_path / "tmp"
    monkeypatch.setattr(gpu_directory, "_RUN_LOCK", run)
    monkeypatch.setattr(gpu_directory, "_TMP", tmp)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp.mkdir()
    assert default_directory() == tmp / "gpuflow-locks"
    run.mkdir(mode=0o755)  # root alone may write: root must not choose what others cannot
    assert default_directory() == tmp / "gpuflow-locks"
    run.chmod(0o1777)
    assert default_directory() == run / "gpuflow"
    (run / "gpuflow").symlink_to(tmp)
    assert default_directory() == tmp / "gpuflow-locks"


@pytest.mark.parametrize("how", ["removed", "looked at"])
def test_a_file_that_is_tidied_away_while_it_is_made_is_made_again(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # Given another process that tidies up between the making of our file and our lock on it
    real, struck = os.fchmod, []

    def tidied(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        if struck:
            return
        (unfinished,) = (path for path in directory.path.iterdir() if path.name.startswith(".new-"))
        if how == "removed":
            unfinished.unlink()
            struck.append(-1)
        else:
            struck.append(os.open(unfinished, os.O_RDONLY))
            fcntl.flock(struck[0], fcntl.LOCK_EX)

    monkeypatch.setattr(gpu_directory.os, "fchmod", tidied)

    # When the mutex is taken for the first time, then it is made all the same
    made = directory.lock("machine.lock")

    assert made is not None
    assert struck
    unlock(made)
    for descriptor in struck:
        if descriptor >= 0:
            os.close(descriptor)
    assert [path.name for path in directory.path.iterdir()] == ["machine.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner may remove every lock in it, the sticky bit or not."""
    foreign = tmp_path / "locks"
    foreign.mkdir()
    foreign.chmod(0o1777)
    os.chown(foreign, 12345, 12345)
    with pytest.raises(GPUFlowError, match=r"belongs to user 12345.*GPUFLOW_LOCK_DIR"):
        LockDirectory(foreign)

    os.chown(foreign, 0, 0)
    LockDirectory(foreign).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_an_owner_without_a_number_is_taken_where_the_operator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the machine's root, mounted into a container of a user."""
    foreign = tmp_path / "locks"
    foreign.mkdir()
    foreign.chmod(0o1777)
    os.chown(foreign, 65534, 65534)
    LockDirectory(foreign).close()

    monkeypatch.setattr(gpu_directory, "default_directory", lambda: foreign)
    with pytest.raises(GPUFlowError, match="belongs to user 65534"):
        LockDirectory(foreign)


def test_no_more_of_a_file_is_read_than_there_should_be(directory: LockDirectory) -> None:
    with (directory.path / "reservation.json").open("wb") as file:
        file.truncate(1 << 30)
    assert len(directory.read("reservation.json")) == gpu_directory.MAX_FILE_BYTES
