"""The log of a child: bounded, and never in the child's way."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpuflow.worker.child_log import ChildLog

MOST = 100_000


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(first, last))


def test_a_log_below_the_bound_is_as_it_was_written_also_by_several_in_turn(tmp_path: Path) -> None:
    for first in (0, 10):
        with ChildLog(tmp_path / "log", MOST) as log:
            log.write(numbered(first, first + 10))

    assert (tmp_path / "log").read_bytes() == numbered(0, 20)


def test_of_a_log_that_grows_without_end_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    longest = 0
    with ChildLog(path, MOST) as log:
        for number in range(200_000):
            log.write(numbered(number, number + 1))
            longest = max(longest, path.stat().st_size) if number % 97 == 0 else longest

    text = path.read_bytes()
    before, left_out, after = re.split(rb"\[gpuflow: (\d+) bytes are left out here[^\n]*\]\n", text)
    assert longest <= MOST + 13 and len(text) <= MOST
    assert before.startswith(numbered(0, 3000)) and after.endswith(numbered(198_500, 200_000))
    assert re.fullmatch(rb"(line \d{7}\n)+", after)
    assert len(before) + int(left_out) + len(after) == 13 * 200_000 + 1


def test_lines_longer_than_the_bound_end_nothing(tmp_path: Path) -> None:
    with ChildLog(tmp_path / "log", MOST) as log:
        for _ in range(5):
            log.write(10 * MOST * b"x" + b"\n")
        log.write(b"the end\n")

    assert (tmp_path / "log").read_bytes().endswith(b"the end\n")
    assert (tmp_path / "log").stat().st_size <= MOST + 200


def test_of_a_last_line_that_is_longer_than_what_is_kept_the_end_is_kept(tmp_path: Path) -> None:
    with ChildLog(tmp_path / "log", MOST) as log:
        log.write(numbered(0, 7000))
        log.write(b"Traceback: " + MOST // 2 * b"x" + b" the cause\n")

    text = (tmp_path / "log").read_bytes()
    assert text.endswith(b"x the cause\n") and len(text) <= MOST


def test_a_log_that_was_emptied_meanwhile_goes_on_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with ChildLog(path, MOST) as log:
        log.write(numbered(0, 7000))
        os.truncate(path, 0)
        log.write(numbered(7000, 8000))

    assert path.read_bytes() == numbered(7000, 8000)


def test_a_full_disk_costs_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with ChildLog(Path("/dev/full"), MOST) as log:
        log.write(b"lost")
        log.write(b"lost too")

    assert caplog.text.count("log_file_given_up") == 1
