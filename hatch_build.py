"""Writes the commit into what is built (`gpuflow/_commit.txt`), for `gpuflow --version` and the list of workers.

It is BUILD_COMMIT, which a build without `.git` needs (as that of an image), or the commit of the checkout, or none.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # type: ignore[import-not-found]


class CommitHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the file to wheels and source archives."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit beside the build and have it included; a checkout that is used in place needs none."""
        root = Path(self.root)
        commit = os.environ.get("BUILD_COMMIT", "").strip() or _commit(root)
        if version == "editable" or not commit or (root / "gpuflow" / "_commit.txt").exists():
            return
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._written = folder / f"commit-{self.target_name}.txt"
        self._written.write_text(f"{commit}\n", encoding="utf-8")
        build_data["force_include"][str(self._written)] = "gpuflow/_commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written beside the build."""
        if written := getattr(self, "_written", None):
            written.unlink(missing_ok=True)


def _commit(root: Path) -> str:
    if not (root / ".git").exists():  # or a checkout around it would be asked
        return ""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
