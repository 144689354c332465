"""Whose the folder of an attempt is when a session answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpuflow.worker import launcher
from gpuflow.worker.child_python import ChildPython
from gpuflow.worker.child_user import ChildUser
from gpuflow.worker.confinement import Confinement
from gpuflow.worker.slots import Allocation

USER = ChildUser(name="tasks", uid=4242, gid=4242, groups=(4242,), home="/home/tasks")


@pytest.mark.parametrize(("user", "calls"), [(USER, 1), (None, 0)], ids=["as the child user", "of containers"])
def test_the_folder_goes_to_the_user_of_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: ChildUser | None, calls: int
) -> None:
    given = Mock()
    monkeypatch.setattr(launcher, "hand_over", given)
    monkeypatch.setattr(launcher, "opening_of", lambda *_, **__: Mock(confinement=Confinement(user=user)))
    runtime: Any = Mock()
    prepared: Any = Mock(output_dir=tmp_path)
    prepared.request.spec = {}
    allocation = Allocation(queue="cpu", slot=Mock(), session="a session")

    launcher.launcher_of(runtime, "tag", allocation, ChildPython(use=Mock(), engine="vllm"), prepared, owner=Mock())()

    assert runtime.admission.sessions.ask.called
    assert given.call_count == calls
