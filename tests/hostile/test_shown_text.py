"""Text of a task forges no line of a log, steers no terminal, and is no markup; errors tell nothing of the machine."""

from __future__ import annotations

import io
import logging
import os
import re
from pathlib import Path

import pytest

import gpuflow
from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.problems import Problem
from gpuflow.logs import dress, get_logger
from gpuflow.terminal import clean, log_lines, log_value
from gpuflow.worker.secret_sources import MissingSecret, secret_values

FORGED = "[2026-01-01 00:00:00,000: INFO/MainProcess] event=task_succeeded task=victim"
#: What ends a line somewhere.
LINE_ENDS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
STEERING = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x07", "\x08", "\u202e", "\u2066", "\u200f", "\u061c", "\x7f"]


@pytest.fixture
def written() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logger = logging.getLogger("gpuflow.hostile-test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("[now] %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    dress("text", logger.name)
    return logger, stream


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_value_begins_no_line(written: tuple[logging.Logger, io.StringIO], end: str) -> None:
    get_logger(written[0].name).info("task_ended", cause=f"bad{end}{FORGED}", many=[f"bad{end}{FORGED}"])

    assert len(written[1].getvalue().splitlines()) == 1


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_message_or_a_traceback_begins_no_record(written: tuple[logging.Logger, io.StringIO], end: str) -> None:
    logger, stream = written
    logger.info("task raised %s", f"bad{end}{FORGED}")
    try:
        raise ValueError(f"bad{end}{FORGED}")
    except ValueError:
        logger.exception("it failed")
        get_logger(logger.name).exception("it_failed")

    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if not line.startswith("    ")]) == 3
    assert not any(line.startswith(FORGED[:20]) for line in lines)


@pytest.mark.parametrize("sequence", STEERING)
def test_nothing_steers_a_terminal(written: tuple[logging.Logger, io.StringIO], sequence: str) -> None:
    get_logger(written[0].name).info("task_ended", cause=f"a{sequence}b")
    written[0].info("a%sb", sequence)

    assert sequence not in written[1].getvalue()
    assert [sequence in shown(f"a{sequence}b") for shown in (clean, log_value, log_lines)] == [False] * 3


def test_rich_reads_no_text_of_others_as_markup() -> None:
    code = "\n".join(path.read_text("utf-8") for path in Path(gpuflow.__path__[0]).rglob("*.py"))
    columns = re.findall(r"TextColumn\([^)]*\)", code)
    prints = re.findall(r"console\.print\(.*|Console\(.*\)\.print\(.*", code)

    assert columns
    assert [column for column in columns if "markup=False" not in column] == []
    assert [one for one in prints if "markup=False" not in one and "Text(" not in one and "(shown)" not in one] == []


def test_an_error_of_a_secret_does_not_name_its_folder(tmp_path: Path) -> None:
    (tmp_path / "OPEN").write_text("value")
    (tmp_path / "OPEN").chmod(0o666)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "EMPTY").touch(mode=0o600)

    for name in ("MISSING", "OPEN", "FOLDER", "EMPTY"):
        with pytest.raises(MissingSecret) as refused:
            secret_values([name], environ={}, folder=tmp_path, worker="w1")
        assert str(tmp_path) not in str(refused.value)
        assert "GPUFLOW_SECRETS_DIR" in str(refused.value)


class Swapped(ResultsFolder):
    """A folder in which a task changes a place for a link between the look at it and its use."""

    def __init__(self, root: Path, place: Path, to: Path) -> None:
        super().__init__(root)
        self._place, self._to = place, to

    def _folder(self, path: Path):  # type: ignore[no-untyped-def]
        if not self._place.is_symlink():
            self._place.rename(self._place.with_name("moved"))
            self._place.symlink_to(self._to)
        return super()._folder(path)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_that_comes_between_is_not_followed(tmp_path: Path, is_folder: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("not of the task")
    task = tmp_path / "results" / "t1"
    (task / "d").mkdir(parents=True)
    (task / "d" / "f").write_text("of the task")
    place, to = (task / "d", outside) if is_folder else (task / "d" / "f", outside / "f")
    swapped = Swapped(tmp_path / "results", place, to)

    with pytest.raises(Problem, match="no file"):
        swapped.open("t1", "d/f")
    if is_folder:
        with pytest.raises(Problem, match="no file"):
            Swapped(tmp_path / "results", task / "d", outside).delete("t1", "d/f")
    assert (outside / "f").exists()


def test_a_link_inside_of_the_task_is_read(tmp_path: Path) -> None:
    task = tmp_path / "results" / "t1"
    (task / "attempt-1").mkdir(parents=True)
    (task / "attempt-1" / "f").write_text("1")
    (task / "f").symlink_to("attempt-1/f")
    (task / "loop").symlink_to("loop")
    folder = ResultsFolder(tmp_path / "results")

    found = folder.open("t1", "f")
    os.close(found.descriptor)

    assert found.size == 1
    with pytest.raises(Problem, match="no file"):
        folder.open("t1", "loop")
