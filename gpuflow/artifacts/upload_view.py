"""Shows a file on its way to the store: a bar in a terminal, nothing anywhere else. Called by the client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpuflow.artifacts.store import Progress
from gpuflow.terminal import one_line

#: A smaller file is there before a bar is seen, in bytes.
_LEAST_BYTES: Final = 4 << 20


@contextmanager
def upload_bar(name: str, size: int) -> Iterator[Progress | None]:
    """Give the progress callback of one file of `size` bytes, None where no bar is shown."""
    if size < _LEAST_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"sending {one_line(name, 40)}", total=size)

        def advance(count: int) -> None:
            bars.advance(task, count)

        yield advance
