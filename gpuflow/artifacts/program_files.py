"""The script or project folder of a command becomes a file or folder of this machine.

Called by `inputs`. An archive is unpacked into the cache, under its digest; the executor works on a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.data_files import local_file
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings

#: What is unpacked.
ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")


def local_program(section: Mapping[str, Any], settings: Settings, unpacked: Callable[[Path], Path]) -> dict[str, Any]:
    """Return a `command` section with `brought`, the place of what its `url` names. Raises ArtifactError, OSError."""
    local = dict(section)
    unsent = next((name for name in ("upload", "project") if local.get(name)), None)
    if unsent is not None:
        raise ArtifactError(
            f"command.{unsent} was not sent: submit the task by gpuflow.submit() or `gpuflow submit` where it is"
        )
    url, sha256 = local.pop("url", None), local.pop("sha256", None)
    if url:
        file = local_file(str(url), sha256, settings)
        local["brought"] = str(unpacked(file) if file.name.endswith(ARCHIVES) else file)
    return local
