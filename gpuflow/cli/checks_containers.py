"""Checks of `gpuflow doctor` of containers: the engine of the machine, and the operator's presets."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING

from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

if TYPE_CHECKING:
    from gpuflow.cli.checks import Check


def container_checks(settings: Settings) -> list[Check]:
    """Check that containers can run; a machine without an engine is no fault. One preset that cannot be read is."""
    from gpuflow.cli.checks import Check
    from gpuflow.spec.container_presets import preset_files, read_preset

    found = [_engine(settings)]
    for name, path in preset_files(settings.container_presets).items():
        try:
            read_preset(path)
        except GPUFlowError as error:
            found.append(Check(name=f"container preset {name}", status="fail", detail=str(error), mend=f"edit {path}"))
    return found


def _engine(settings: Settings) -> Check:
    from gpuflow.cli.checks import Check
    from gpuflow.worker.containers.engines import find_engine
    from gpuflow.worker.containers.removal import EngineError, call

    engine = find_engine(settings.container_engine)
    if engine.path is None:
        return Check(name="containers", status="ok", detail=f"{engine.why}: presets run as plain processes")
    try:
        status, version = call(engine.path, "GET", "/version")
    except EngineError as error:
        return Check(
            name="containers", status="fail", detail=str(error), mend="start it, or set GPUFLOW_CONTAINER_ENGINE"
        )
    if status != 200 or not isinstance(version, dict):
        detail = f"{engine.path} answers {status} to /version; it is no container engine"
        return Check(name="containers", status="fail", detail=detail, mend="set GPUFLOW_CONTAINER_ENGINE")
    if util.find_spec("docker") is None:
        detail = f"an engine answers at {engine.path}, and the Docker SDK is not installed beside gpuflow"
        return Check(name="containers", status="warn", detail=detail, mend='pip install "gpuflow[container]"')
    return Check(name="containers", status="ok", detail=f"engine {version.get('Version')} at {engine.path}")
