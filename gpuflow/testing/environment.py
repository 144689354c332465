"""What processes of a test get of the developer's environment: everything but settings of gpuflow and Celery."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpuflow.settings import env_names

#: Beside the settings: what gpuflow, Celery and CUDA read of an environment.
_PREFIXES: Final = ("GPUFLOW_", "CELERY_", "OTEL_", "FLOWER_")
_NAMES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "FAKE_NVML_STATE")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings of gpuflow and Celery, and without a choice of GPUs."""
    known = {*env_names().values(), *_NAMES}
    return {name: value for name, value in environment.items() if name not in known and not name.startswith(_PREFIXES)}


@contextlib.contextmanager
def environment_of(settings: Mapping[str, str]) -> Iterator[None]:
    """Give these settings alone to this process and to what it starts; put the former ones back at the end."""
    before = dict(os.environ)
    kept = without_settings(before)
    changed = before.keys() - kept.keys() | settings.keys()
    try:
        for name in before.keys() - kept.keys():
            del os.environ[name]
        os.environ.update(settings)
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changed if name in before})


def import_path() -> str:
    """Return PYTHONPATH for a worker, so that it imports what the tests do: pytest changes sys.path alone."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    installed.add(os.path.realpath(Path(sysconfig.get_path("stdlib")) / "lib-dynload"))
    folders = [str(Path(entry or ".").absolute()) for entry in sys.path]
    own = [entry for entry in folders if os.path.realpath(entry) not in installed and not entry.endswith(".zip")]
    return os.pathsep.join(dict.fromkeys([*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
