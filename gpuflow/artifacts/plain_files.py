"""The plain files that a task has left in a folder: no link is followed, and no pipe or device is looked into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def plain_files(folder: Path) -> Iterator[Path]:
    """Yield the plain files in and below a folder, in no order; a folder that may not be read counts as empty.

    What an entry is comes with the listing: a file costs no call to the system. Raises OSError.
    """
    left = [folder]
    while left:
        place = left.pop()
        try:
            with os.scandir(place) as listed:
                entries = list(listed)  # whoever asks may change what is there meanwhile
        except PermissionError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left.append(place / entry.name)
            elif entry.is_file(follow_symlinks=False):
                yield place / entry.name
