"""A symbolic link that appears by rename, over one that is there. Called by whoever points names at an attempt."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path


def point(link: Path, target: Path) -> None:
    """Let `link` lead to `target`, which is relative to its folder; two at once do no harm. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        link.symlink_to(target)
        return
    fresh = link.with_name(f".{link.name[:100]}.new-{uuid.uuid4().hex}")
    fresh.symlink_to(target)
    try:
        fresh.replace(link)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
