"""Simulated GPU machines: the real pynvml talks to a library built from simulated_nvml.c. Linux; needs a C compiler.

A process gets a machine by environment variables, which must be set before it starts:

    env = simulated_machine(folder, "4xA100-80GB", build_library(folder))
    subprocess.run([...], env={**os.environ, **env})

`write_machine()` changes the machine while processes run, for instance to lose a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError

#: What every process looks for by this name (soname).
_LIBRARY: Final = "libnvidia-ml.so.1"
_SOURCE: Final = Path(__file__).with_name("simulated_nvml.c")

#: Label of a GPU -> (name and total memory in MiB as NVML reports them, compute capability).
MODELS: dict[str, tuple[str, int, tuple[int, int]]] = {
    "T4": ("Tesla T4", 15360, (7, 5)),
    "V100-16GB": ("Tesla V100-SXM2-16GB", 16384, (7, 0)),
    "V100-32GB": ("Tesla V100-SXM2-32GB", 32768, (7, 0)),
    "P100": ("Tesla P100-PCIE-16GB", 16384, (6, 0)),
    "A10": ("NVIDIA A10", 23028, (8, 6)),
    "A10G": ("NVIDIA A10G", 23028, (8, 6)),
    "A30": ("NVIDIA A30", 24576, (8, 0)),
    "A40": ("NVIDIA A40", 46068, (8, 6)),
    "A6000": ("NVIDIA RTX A6000", 49140, (8, 6)),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", 40960, (8, 0)),
    "A100-40GB-PCIE": ("NVIDIA A100-PCIE-40GB", 40960, (8, 0)),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 81920, (8, 0)),
    "A100-80GB-PCIE": ("NVIDIA A100 80GB PCIe", 81920, (8, 0)),
    "H100": ("NVIDIA H100 80GB HBM3", 81559, (9, 0)),
    "H100-NVL": ("NVIDIA H100 NVL", 95830, (9, 0)),
    "H200": ("NVIDIA H200", 143771, (9, 0)),
    "B200": ("NVIDIA B200", 183359, (10, 0)),
    "GH200": ("NVIDIA GH200 480GB", 97871, (9, 0)),
    "L4": ("NVIDIA L4", 23034, (8, 9)),
    "L40": ("NVIDIA L40", 46068, (8, 9)),
    "L40S": ("NVIDIA L40S", 46068, (8, 9)),
    "RTX2080TI": ("NVIDIA GeForce RTX 2080 Ti", 11264, (7, 5)),
    "RTX3090": ("NVIDIA GeForce RTX 3090", 24576, (8, 6)),
    "RTX4090": ("NVIDIA GeForce RTX 4090", 24564, (8, 9)),
    "RTX5090": ("NVIDIA GeForce RTX 5090", 32607, (12, 0)),
}

#: MIG profile -> memory of the slice in MiB, on an A100 40 GB, an A100 80 GB or an H100 80 GB.
MIG_MIB = {
    "1g.5gb": 4864, "2g.10gb": 9984, "3g.20gb": 20096, "7g.40gb": 40448,
    "1g.10gb": 9728, "2g.20gb": 19968, "3g.40gb": 40192, "7g.80gb": 81007,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimGpu:
    """One GPU of a simulated machine: `model` is a key of MODELS, or any NVML name together with `total_mib`.

    `slices` are MIG profiles such as "3g.40gb" (which switch MIG mode on); `processes` are (pid, used MiB)
    pairs, or (pid, used MiB, slice) on a slice by its number; used MiB None: the driver does not tell. `used_mib` None
    is the sum of the processes' memory.
    """

    model: str = "A100-80GB"
    uuid: str | None = None
    total_mib: int | None = None
    used_mib: int | None = None
    utilization_percent: int = 0
    temperature_c: int = 35
    power_mw: int = 60_000
    mig: bool = False
    lost: bool = False
    ecc_errors: int = 0
    energy_mj: int = -1
    slices: Sequence[str] = ()
    processes: Sequence[tuple[int, int | None] | tuple[int, int | None, int]] = ()

    def lines(self, index: int) -> list[str]:
        """Return the lines of the state file."""
        name, total_mib, (major, minor) = MODELS.get(self.model, (self.model, 16384, (8, 0)))
        uuid = self.uuid or gpu_uuid(index)
        mig = int(self.mig or bool(self.slices))
        lines = [
            f"G {uuid} {name.replace(' ', '_')} {self.total_mib or total_mib} {self.used(None)} "
            f"{self.utilization_percent} 0 {self.temperature_c} {self.power_mw} "
            f"{mig} {int(self.lost)} {major} {minor} {self.ecc_errors} {self.energy_mj}"
        ]
        lines += [
            f"M {index} {mig_uuid(index, number)} {MIG_MIB[profile]} {self.used(number)} {profile}"
            for number, profile in enumerate(self.slices)
        ]
        for pid, used, *where in self.processes:
            lines.append(f"P {index} {pid} {-1 if used is None else used} {where[0] if where else -1}")
        return lines

    def used(self, number: int | None) -> int:
        """Return the MiB in use on the GPU, or on a slice of it."""
        if number is None and self.used_mib is not None:
            return self.used_mib
        return sum(used or 0 for _, used, *where in self.processes if number is None or where == [number])


def gpu_uuid(index: int) -> str:
    """Return the UUID that a simulated GPU without one of its own has."""
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def mig_uuid(index: int, number: int) -> str:
    """Return the UUID of a MIG slice."""
    return f"MIG-{index:08x}-{number:04x}-5555-6666-777777777777"


def machine_gpus(machine: str | Sequence[str | SimGpu]) -> list[SimGpu]:
    """Read "4xA100-80GB", "T4 + 2x RTX4090", ["T4", SimGpu(...)] or "" (no GPU) into GPUs. Raises GPUFlowError."""
    gpus: list[SimGpu] = []
    for part in re.split(r"[+,]", machine) if isinstance(machine, str) else machine:
        if isinstance(part, SimGpu):
            gpus.append(part)
        elif part.strip():
            found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", part.strip().upper(), re.IGNORECASE)
            if found is None or found[2] not in MODELS:
                raise GPUFlowError(f"no simulated GPU {part.strip()!r}; there are {', '.join(MODELS)}, and SimGpu(...)")
            gpus += [SimGpu(model=found[2])] * int(found[1] or 1)
    return gpus


def write_machine(path: Path, machine: str | Sequence[str | SimGpu], *, hang_ms: int = 0) -> None:
    """Write the state file of a machine, by rename, so that a running reader never sees half of it.

    With `hang_ms` every call of the driver takes so long.
    """
    text = "".join(f"{line}\n" for index, gpu in enumerate(machine_gpus(machine)) for line in gpu.lines(index))
    if hang_ms:
        text += f"H {hang_ms}\n"
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def simulated_machine(path: Path, machine: str | Sequence[str | SimGpu], library: Path) -> dict[str, str]:
    """Write a machine into the folder `path` and return the environment that gives it to a process.

    The state file is `path / "nvml.state"`. `library` is what `build_library` has returned.
    """
    state = path / "nvml.state"
    write_machine(state, machine)
    folders = [str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": ":".join(filter(None, folders)), "FAKE_NVML_STATE": str(state)}


def build_library(folder: Path, *flags: str) -> Path:
    """Build the library in this folder and return its path; it takes a third of a second. Raises GPUFlowError."""
    if sys.platform != "linux":
        raise GPUFlowError("simulated GPUs need Linux; run tests that need none without `machine`")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise GPUFlowError("simulated GPUs need a C compiler (cc, gcc or clang); run `apt-get install gcc libc6-dev`")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / _LIBRARY
    unfinished = folder / f"{_LIBRARY}.{os.getpid()}"
    command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{_LIBRARY}", *flags]
    done = subprocess.run(
        [*command, "-o", str(unfinished), str(_SOURCE)], capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode:
        raise GPUFlowError(
            f"the library of simulated GPUs was not built by {compiler} (exit code {done.returncode}); "
            f"check that the headers of libc are there: `apt-get install libc6-dev`\n{done.stderr[-2000:]}"
        )
    unfinished.replace(library)
    return library
