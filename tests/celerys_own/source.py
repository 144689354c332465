"""The tests of the Celery that is installed, from its source distribution."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

#: What is taken of the distribution: the tests, and not Celery, which is the installed one.
_WANTED: Final = ("t/__init__.py", "t/canvas_helpers.py", "t/skip.py", "t/integration/")


def unpacked(cache: Path) -> Path:
    """Return the folder that holds Celery's package `t`, downloaded by pip if it is not in the cache.

    Raises CalledProcessError for a download that fails, FileNotFoundError for a distribution without tests.
    """
    name = f"celery-{version('celery')}"
    folder = cache / f"{name}-tests"
    if (folder / "t" / "integration").is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    wanted = f"celery=={version('celery')}"
    command = ["download", "--quiet", "--no-deps", "--no-binary", "celery", "--dest", str(cache), wanted]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    fresh = folder.with_suffix(".new")
    with tarfile.open(cache / f"{name}.tar.gz") as archive:
        members = [one for one in archive if one.name.removeprefix(f"{name}/").startswith(_WANTED)]
        archive.extractall(fresh, members, filter="data")
    (fresh / name).rename(folder)
    return folder
