"""The results folders of callers: hard links that several threads may make at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuflow.merge import folders

THREADS = 4
FILES = 3


def test_threads_that_complete_one_caller_at_once_leave_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "run" / "attempt-1"
    source.mkdir(parents=True)
    for number in range(FILES):
        (source / f"{number}.txt").write_text(str(number))
    warnings: list[str] = []
    monkeypatch.setattr(folders.log, "warning", lambda event, **data: warnings.append(f"{event} {data}"))
    together = threading.Barrier(THREADS)
    link_tree = folders.hold_tree

    def link_at_once(*arguments: Any, **options: Any) -> None:
        together.wait(timeout=30)
        link_tree(*arguments, **options)
        together.wait(timeout=30)

    monkeypatch.setattr(folders, "hold_tree", link_at_once)

    def link(_: int) -> Path | None:
        return folders.link_results(tmp_path, "run", 1, "digest", "caller", single=True)

    with ThreadPoolExecutor(THREADS) as pool:
        made = set(pool.map(link, range(THREADS)))

    assert made == {tmp_path / "caller" / "attempt-1"}
    assert {path.name for path in (tmp_path / "caller" / "attempt-1").iterdir()} == {f"{n}.txt" for n in range(FILES)}
    assert (tmp_path / "caller" / "2.txt").read_text() == "2"
    assert not [path.name for path in (tmp_path / "caller").iterdir() if path.name.startswith(".")]
    assert not warnings
