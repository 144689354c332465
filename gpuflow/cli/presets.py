"""`gpuflow presets` and `gpuflow models`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import click

from gpuflow.cli.errors import DONE
from gpuflow.cli.options import json_option
from gpuflow.errors import GPUFlowError


@click.command(short_help="List what is shipped.")
@click.argument("kind", required=False)
@json_option
def presets(kind: str | None, as_json: bool) -> None:
    """List the shipped presets, of one KIND (pipelines, models, datasets, environments, ...) or of all."""
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


@click.group(invoke_without_command=True, short_help="List the model presets, or fetch one.")
@json_option
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List the model presets, or fetch one into the cache."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models, as_json=as_json)


@models.command("list")
@json_option
def list_models(as_json: bool = False) -> None:
    """List the model presets, and which of them are ready in the cache of this machine."""
    from gpuflow.cli import output

    ended = _executors_models("list", "--json", capture=True)
    events = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    rows = next((event["value"]["models"] for event in events if event.get("event") == "result"), None)
    if rows is None:
        raise GPUFlowError(f"the model presets cannot be listed: {ended.stderr.strip()[-300:]}")
    if as_json:
        output.emit_json(rows)
        return
    output.table(
        ["model", "here", "about"],
        [[row["name"], "ready" if row["path"] else row["source"], row["description"]] for row in rows],
        empty="no model presets",
    )


@models.command("pull")
@click.argument("name")
def pull(name: str) -> int:
    """Fetch a model or data preset into the cache, converted and ready for its first use."""
    from gpuflow.cli.errors import FAILED, bad_input
    from gpuflow.spec.presets import list_presets, preset_path

    if name not in list_presets("datasets"):
        try:
            preset_path("models", name)
        except GPUFlowError as error:
            raise bad_input(str(error)) from error
    return FAILED if _executors_models("pull", name).returncode else DONE


def _executors_models(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the program of the executors that prepares presets: it alone may load their libraries."""
    from gpuflow.cluster.commands import with_our_packages
    from gpuflow.settings import Settings

    command = [sys.executable, "-P", "-m", "executors.models", *arguments]
    command += ["--cache-dir", str(Settings.load().cache_dir)]
    return subprocess.run(
        command, check=False, text=True, capture_output=capture, env=with_our_packages(os.environ), errors="replace"
    )


def _rows(kind: str) -> list[dict[str, Any]]:
    from gpuflow.spec.presets import list_presets, load_preset

    rows = []
    for name in list_presets(kind):
        try:
            about = _about(load_preset(kind, name))
        except GPUFlowError as error:
            about = f"cannot be read: {error}"
        rows.append({"kind": kind, "name": name, "about": about})
    return rows


def _about(preset: dict[str, Any]) -> str:
    """Return what a preset says of itself."""
    metadata = preset.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    for place in (preset, annotations, metadata):
        if isinstance(place, dict) and isinstance(place.get("description"), str):
            return str(place["description"])
    return ""
