"""How the Python of another environment finds our own packages: a folder that holds links to them and nothing else.

The folder in which gpuflow is installed may hold another torch beside it, which must not come before the environment's
own. Called by the check of an environment and by the worker, for PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.process_guard import process_umask
from gpuflow.settings import Settings

#: What a child imports of ours.
_PACKAGES: Final = ("gpuflow", "executors")


def packages_path(settings: Settings) -> Path:
    """Return the folder with links to our packages, made if it is not there. Raises GPUFlowError, OSError."""
    places = {name: _home_of(name) for name in _PACKAGES}
    digest = hashlib.sha256("\0".join(map(str, places.values())).encode()).hexdigest()[:10]
    folder = settings.env_dir / f".packages-{digest}"
    if folder.is_dir():
        return folder
    settings.env_dir.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".packages-new-", dir=settings.env_dir))
    try:
        made.chmod(0o777 & ~process_umask())
        for name, place in places.items():
            (made / name).symlink_to(place, target_is_directory=True)
        # Whoever comes second finds the folder there, with the same links.
        with contextlib.suppress(FileExistsError, OSError):
            os.rename(made, folder)  # noqa: PTH104  (Path.rename would say the same)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if not folder.is_dir():
        raise GPUFlowError(f"{folder} cannot be made; mend the rights of GPUFLOW_ENV_DIR")
    return folder


def _home_of(name: str) -> Path:
    found = find_spec(name)
    if found is None or not found.origin:
        raise GPUFlowError(f"the package {name!r} is not installed beside gpuflow; install gpuflow again")
    return Path(found.origin).resolve().parent
