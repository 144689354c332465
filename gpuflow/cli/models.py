"""`gpuflow models`: the presets and what is in the cache, fetched, removed, exported and imported.

The libraries of the executors are loaded by `python -m executors.models` alone, a child process; what an archive of
models holds is decided in `models_bundle`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from gpuflow.cli.errors import bad_input
from gpuflow.cli.options import json_option
from gpuflow.errors import GPUFlowError

_ARCHIVES = (".tar.gz", ".tgz", ".tar.zst")


@click.group(invoke_without_command=True, short_help="List, fetch, export and import models.")
@json_option
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List, fetch, remove, export and import models.

    A NAME is a preset (`gpuflow presets models`, `gpuflow presets datasets`) or a model of the Hugging Face hub,
    organisation/name, with @revision if you like.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models, as_json=as_json)


@models.command("list")
@json_option
def list_models(as_json: bool = False) -> None:
    """List the model presets and the models of the hub, and which are ready in the cache of this machine."""
    from gpuflow.cli import output
    from gpuflow.cli.models_child import ask

    rows = ask("list")["models"]
    if as_json:
        output.emit_json(rows)
        return
    output.table(
        ["model", "here", "size", "last used", "about"],
        [
            [
                row["name"],
                "ready" if row["path"] else row["source"],
                _size(row["size_bytes"]),
                output.when_ago(row["used_at"], time.time()),
                row["description"],
            ]
            for row in rows
        ],
        empty="no model presets",
    )


@models.command("pull")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def pull(names: tuple[str, ...]) -> None:
    """Fetch models or data sets into the cache, converted and ready for their first use."""
    from gpuflow.cli import output
    from gpuflow.cli.models_child import ask
    from gpuflow.settings import Settings

    for name in names:
        _check_name(name)
    limit = Settings.load().model_cache_max_bytes
    options = ["--max-bytes", str(limit)] if limit is not None else []
    for row in ask("pull", *options, "--", *names)["models"]:
        output.line(f"{row['name']}  {row['path']}")


@models.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(names: tuple[str, ...]) -> None:
    """Remove models or data sets from the cache; one that a task uses stays."""
    from gpuflow.cli import output
    from gpuflow.cli.models_child import ask

    for name in names:
        _check_name(name)
    for row in ask("rm", "--", *names)["removed"]:
        output.line(f"{row['name']}  {_size(row['freed_bytes'])} freed")


@models.command("export")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-o", "--output", "target", required=True, metavar="FILE", help="A .tar.gz or .tar.zst to write.")
def export(names: tuple[str, ...], target: str) -> None:
    """Write models and data sets of the cache to one archive, for a machine without a network."""
    from gpuflow.cli import output
    from gpuflow.cli.models_bundle import write
    from gpuflow.cli.models_child import ask
    from gpuflow.settings import Settings

    for name in names:
        _check_name(name)
    path = Path(target).absolute()
    if not path.name.endswith(_ARCHIVES):
        raise bad_input(f"{target} ends in none of {', '.join(_ARCHIVES)}; name an archive such as models.tar.gz")
    if not path.parent.is_dir():
        raise bad_input(f"{path.parent} is no folder; make it first")
    entries = ask("describe", "--", *dict.fromkeys(names))["entries"]
    packed = write(entries, path, Settings.load().cache_dir)
    output.line(f"{path}  {_size(packed.size)}  sha256 {packed.sha256}")


@models.command("import")
@click.argument("archive", metavar="FILE")
def import_(archive: str) -> None:
    """Bring the models of an archive that `gpuflow models export` wrote into the cache; every file is checked first."""
    from gpuflow.cli import output
    from gpuflow.cli.models_bundle import read
    from gpuflow.cli.models_child import ask
    from gpuflow.settings import Settings

    path = Path(archive)
    if not path.is_file():
        raise bad_input(f"{archive} is no file on this machine; give an archive of `gpuflow models export`")
    settings = Settings.load()
    places = ask("where")
    hub = Path(places["hub"]) if places["hub"] else None
    known = {place: Path(target) for place, target in places["entries"].items()}
    for imported in read(path, settings.cache_dir, known=known, hub=hub):
        output.line(f"{imported.name}  {imported.path}{'' if imported.new else '  (was here)'}")
    if settings.model_cache_max_bytes is not None:
        ask("trim", "--max-bytes", str(settings.model_cache_max_bytes))


def _check_name(name: str) -> None:
    """Raise bad_input for what is neither a preset nor looks like a model of the hub; before any child is started."""
    from gpuflow.spec.presets import list_presets, preset_path

    if "/" in name or name in list_presets("datasets"):
        return
    try:
        preset_path("models", name)
    except GPUFlowError as error:
        raise bad_input(f"{error}; a model of the hub is named organisation/name") from error


def _size(count: Any) -> str:
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
