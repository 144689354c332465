"""Breaks the machine of a worker, by BROKEN_MACHINE: `driver` or `memory`. Loaded by `--include broken_machine`."""

from __future__ import annotations

import os

import psutil

from gpuflow.fleet import hardware_host

if os.environ.get("BROKEN_MACHINE") == "driver":  # the kernel has a device, and the driver's library is missing
    hardware_host.has_nvidia_device = lambda: True
if os.environ.get("BROKEN_MACHINE") == "memory":
    _memory = psutil.virtual_memory
    psutil.virtual_memory = lambda: _memory()._replace(available=400 << 20)  # type: ignore[assignment]
