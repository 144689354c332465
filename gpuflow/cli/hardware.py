"""`gpuflow hardware`: what this machine has."""

from __future__ import annotations

import click

from gpuflow.cli.options import json_option


@click.command(short_help="Show the GPUs, CPUs and memory of this machine.")
@json_option
def hardware(as_json: bool) -> None:
    """Show what a worker on this machine may use, as CUDA_VISIBLE_DEVICES and control groups allow."""
    from gpuflow.cli import output
    from gpuflow.fleet.hardware import probe
    from gpuflow.routing.capability import Capability

    found = probe()
    if as_json:
        output.emit_json(found.to_dict())
        return
    output.pairs(
        {
            "host": found.hostname,
            "cpus": str(found.cpu_count),
            "memory": f"{found.memory_total_mib / 1024:.1f} GiB, {found.memory_available_mib / 1024:.1f} GiB available",
            "driver": found.driver_version,
            "cuda": found.cuda_version,
            "gpus": "" if found.gpus else f"none: {found.nvml}" if found.nvml else "none",
        }
    )
    if found.gpus:
        names = {gpu.uuid: gpu for gpu in Capability.of(found).gpus}
        output.line()
        output.table(
            ["gpu", "name", "ask for it as", "memory", "free", "use", "uuid"],
            [
                [
                    gpu.index,
                    gpu.name,
                    f"{names[gpu.uuid].name} ({names[gpu.uuid].vram_gb:g} GB)",
                    f"{gpu.total_mib} MiB",
                    f"{gpu.free_mib} MiB",
                    "" if gpu.utilization_percent is None else f"{gpu.utilization_percent} %",
                    gpu.uuid,
                ]
                for gpu in found.gpus
            ],
        )
    for problem in found.problems:
        output.note(f"problem: {problem}")
