"""The cache of prepared models and data sets: where it is, one preparer at a time, entries that appear whole.

Used by `modeling`, `data` and `models`. An entry is a folder or file under its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gpuflow.protocol import Emitter

#: Fields of a preset that say something to people, or that count after it is prepared.
_DESCRIBING: Final = frozenset(
    {
        "name", "description", "licence", "parameters", "context_tokens", "size_bytes", "chat_template", "columns",
        "transformers",
    }
)  # fmt: skip


def cache_root(cache_dir: str | None) -> Path:
    """Return the cache folder: the request's, else $GPUFLOW_CACHE_DIR, else ~/.cache/gpuflow."""
    chosen = cache_dir or os.environ.get("GPUFLOW_CACHE_DIR")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "gpuflow"


def entry_name(name: str, preset: Mapping[str, Any]) -> str:
    """Return the name of a preset's entry; it changes with everything that decides the content."""
    recipe = {key: value for key, value in preset.items() if key not in _DESCRIBING}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:12]}"


@contextlib.contextmanager
def locked(root: Path, name: str, emitter: Emitter) -> Iterator[None]:
    """Hold the lock of entry `name`; waits, and says so, while another process prepares it. Raises OSError."""
    folder = root / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emitter.status("loading", f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Give an empty folder on the cache's own disk, so that a rename out of it is atomic; removed at the end."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
