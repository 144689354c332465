"""Breaks the machine of a worker, by BROKEN_MACHINE: `driver` or `memory`. Loaded by `--include broken_machine`."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from gpuflow.fleet import hardware

if os.environ.get("BROKEN_MACHINE") == "driver":  # the kernel has a device, and the driver's library is missing
    hardware._DEVICE = Path("/dev/null")
if os.environ.get("BROKEN_MACHINE") == "memory":
    _memory = psutil.virtual_memory
    psutil.virtual_memory = lambda: _memory()._replace(available=400 << 20)  # type: ignore[assignment]
