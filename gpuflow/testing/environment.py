"""What processes of a test get of the developer's environment: everything but settings of gpuflow and Celery."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from gpuflow.settings import env_names

#: Beside the settings: what gpuflow, Celery and their parts read of an environment.
_PREFIXES: Final = ("GPUFLOW_", "CELERY_", "OTEL_", "FLOWER_")
_ADDRESSES: Final = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND")
#: What chooses the GPUs of a process.
_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "FAKE_NVML_STATE")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings of gpuflow and Celery."""
    known = set(env_names().values())
    return {name: value for name, value in environment.items() if name not in known and not name.startswith(_PREFIXES)}


def for_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a worker starts with: without settings, and without a choice of GPUs."""
    return {name: value for name, value in without_settings(environment).items() if name not in _GPUS}


@contextlib.contextmanager
def environment_of(settings: Mapping[str, str]) -> Iterator[None]:
    """Give these settings alone to this process and to what it starts; put the former ones back at the end."""
    with _replaced(os.environ.keys() - without_settings(os.environ).keys(), settings):
        yield


@contextlib.contextmanager
def without_addresses() -> Iterator[None]:
    """Take away what Celery takes for the address of every app of the process, whatever the settings of the app are."""
    with _replaced(_ADDRESSES, {}):
        yield


@contextlib.contextmanager
def _replaced(removed: Collection[str], added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in {*removed, *added} if name in os.environ}
    try:
        for name in before:
            del os.environ[name]
        os.environ.update(added)
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        os.environ.update(before)


def import_path() -> str:
    """Return PYTHONPATH for a worker, so that it imports what the tests do: pytest changes sys.path alone."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    installed.add(os.path.realpath(Path(sysconfig.get_path("stdlib")) / "lib-dynload"))
    folders = [str(Path(entry or ".").absolute()) for entry in sys.path]
    own = [entry for entry in folders if os.path.realpath(entry) not in installed and not entry.endswith(".zip")]
    return os.pathsep.join(dict.fromkeys([*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
