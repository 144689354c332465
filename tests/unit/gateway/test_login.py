"""The login of the local cluster's gateway: whose file it is while several commands use one state folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from gpuflow.gateway.login import (
    TOKEN_VARIABLE,
    URL_VARIABLE,
    login_file,
    login_of_another,
    make_login,
    read_login,
    remove_login,
)
from gpuflow.settings import Settings


def written_by(state: Path, process: int, created: float) -> dict[str, Any]:
    """Write the login of another command."""
    found = {"url": "http://127.0.0.1:1", "token": "t" * 8 + "abcdefgh" * 3, "pid": process, "created": created}
    state.mkdir(exist_ok=True)
    login_file(state).write_text(json.dumps(found))
    return found


def test_the_login_of_a_gateway_that_lives_is_kept(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    theirs = written_by(tmp_path, parent.pid, parent.create_time())

    mine = make_login(Settings(state_dir=tmp_path), 2)

    assert mine == {TOKEN_VARIABLE: theirs["token"], URL_VARIABLE: "http://127.0.0.1:2"}
    remove_login(tmp_path, mine)
    assert read_login(tmp_path) == (theirs["url"], theirs["token"])
    assert login_of_another(tmp_path) == {TOKEN_VARIABLE: theirs["token"], URL_VARIABLE: theirs["url"]}


def test_what_a_killed_command_has_left_is_written_anew(tmp_path: Path) -> None:
    for process, created in ((os.getppid(), 1.0), (2**30, 1.0), (-1, 1.0)):
        theirs = written_by(tmp_path, process, created)
        assert login_of_another(tmp_path) == {}

        mine = make_login(Settings(state_dir=tmp_path), 2)

        assert mine[TOKEN_VARIABLE] != theirs["token"]
        assert read_login(tmp_path) == (mine[URL_VARIABLE], mine[TOKEN_VARIABLE])
        assert login_of_another(tmp_path) == {}
    remove_login(tmp_path, mine)
    assert read_login(tmp_path) is None


def test_a_login_that_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", '"x"', "{}", '{"url": "u"}', "\udcff"):
        login_file(tmp_path).write_text(text, errors="surrogateescape")
        assert read_login(tmp_path) is None
        assert login_of_another(tmp_path) == {}
    login_file(tmp_path).write_text('{"url": "u", "token": "t"}')  # of an older version
    assert read_login(tmp_path) == ("u", "t")
    assert login_of_another(tmp_path) == {}
