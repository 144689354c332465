"""`gpuflow presets`."""

from __future__ import annotations

from typing import Any

import click

from gpuflow.cli.options import json_option
from gpuflow.errors import GPUFlowError


@click.command(short_help="List what is shipped.")
@click.argument("kind", required=False)
@json_option
def presets(kind: str | None, as_json: bool) -> None:
    """List the presets, of one KIND (pipelines, models, datasets, environments, ...) or of all."""
    from gpuflow.cli import output
    from gpuflow.cli.errors import bad_input
    from gpuflow.spec.presets import KINDS

    if kind is not None and kind not in KINDS:
        raise bad_input(f"no presets of kind {kind!r}; the kinds are {', '.join(KINDS)}")
    rows = [row for name in ([kind] if kind else KINDS) for row in _rows(name)]
    if as_json:
        output.emit_json(rows)
        return
    output.table(["kind", "name", "about"], [[row["kind"], row["name"], row["about"]] for row in rows], empty="none")


def _rows(kind: str) -> list[dict[str, Any]]:
    from gpuflow.spec.presets import list_presets, load_preset

    if kind == "containers":
        return _containers()
    rows = []
    for name in list_presets(kind):
        try:
            about = _about(load_preset(kind, name))
        except GPUFlowError as error:
            about = f"cannot be read: {error}"
        rows.append({"kind": kind, "name": name, "about": about})
    return rows


def _containers() -> list[dict[str, Any]]:
    """Return the container presets, shipped and of this machine's GPUFLOW_CONTAINER_PRESETS."""
    from gpuflow.settings import Settings
    from gpuflow.spec.container_presets import preset_files, read_preset

    rows = []
    for name, path in preset_files(Settings.load().container_presets).items():
        try:
            about = read_preset(path).description or ""
        except GPUFlowError as error:
            about = f"cannot be read: {error}"
        rows.append({"kind": "containers", "name": name, "about": about})
    return rows


def _about(preset: dict[str, Any]) -> str:
    """Return what a preset says of itself."""
    metadata = preset.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    for place in (preset, annotations, metadata):
        if isinstance(place, dict) and isinstance(place.get("description"), str):
            return str(place["description"])
    return ""
