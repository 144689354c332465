"""`gpuflow env`: builds, lists, checks and removes the environments of executors on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import DONE, FAILED, Terminated, bad_input, interrupted
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.environments import Definition, Progress, Standing, Variant
    from gpuflow.settings import Settings

_VARIANTS: Final = ("auto", "cpu", "cuda")
#: Without a terminal, a line at least every so many seconds while something goes on.
_SILENCE_SECONDS: Final = 30.0

_variant = click.option(
    "--variant", type=click.Choice(_VARIANTS), default="auto", help="For a machine with or without GPU (auto: as here)."
)


@click.group(invoke_without_command=True, short_help="Build, list and check the environments of executors.")
@json_option
@click.pass_context
def env(ctx: click.Context, as_json: bool) -> None:
    """Build, list, check and remove the environments of executors, in GPUFLOW_ENV_DIR."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_environments, as_json=as_json)


@env.command("list")
@json_option
def list_environments(as_json: bool = False) -> None:
    """List the environments, and which of them are built here and work."""
    from gpuflow.cli import output
    from gpuflow.environments import names, standings
    from gpuflow.errors import GPUFlowError
    from gpuflow.settings import Settings

    settings = Settings.load()
    rows: list[dict[str, Any]] = []
    for name in names(settings):
        try:
            rows += [_row(standing) for standing in standings(settings, name)]
        except GPUFlowError as error:
            rows.append({"name": name, "variant": None, "status": "broken", "detail": str(error), "task_types": []})
    if as_json:
        output.emit_json(rows)
        return
    output.table(
        ["environment", "variant", "status", "size", "python", "serves", "about"],
        [
            [
                row["name"],
                row["variant"] or "",
                row["status"],
                _size(row.get("size_bytes")),
                row.get("python_version", ""),
                ", ".join(row["task_types"]),
                row["detail"],
            ]
            for row in rows
        ],
    )


def _row(standing: Standing) -> dict[str, Any]:
    marker = standing.marker
    return {
        "name": standing.name,
        "variant": standing.variant,
        "status": standing.status,
        "detail": standing.detail or standing.definition.description,
        "path": str(standing.folder) if standing.folder else None,
        "task_types": sorted(standing.definition.task_types),
        "python_version": marker.python_version if marker else "",
        "size_bytes": marker.size_bytes if marker else None,
        "built_at": marker.built_at if marker else None,
        "build_seconds": marker.build_seconds if marker else None,
    }


@env.command("create")
@click.argument("name")
@_variant
@click.option("--wheelhouse", metavar="DIR", help="Install from the wheels in this folder, without a network.")
@click.option("--force", is_flag=True, help="Build it again although it is there.")
@json_option
def create_environment(name: str, variant: str, wheelhouse: str | None, force: bool, as_json: bool) -> int:
    """Build the environment NAME on this machine, and check that it works.

    What is there and works is left alone. While it is built again, tasks go on in the former one.
    """
    from gpuflow.cli import output
    from gpuflow.environments import create

    settings, definition = _load(name)
    chosen = _choose(definition, variant)
    wheels = Path(wheelhouse).expanduser().absolute() if wheelhouse is not None else None
    if wheels is not None and not wheels.is_dir():
        raise bad_input(f"{wheelhouse} is no folder; give one that holds wheels")
    try:
        with _progress(f"{name} ({chosen})") as tell, _ended_by_signals():
            built = create(settings, definition, chosen, wheelhouse=wheels, force=force, tell=tell, say=output.note)
    except Terminated as error:
        return interrupted(error)
    marker = built.marker
    if as_json:
        from dataclasses import asdict

        output.emit_json({**asdict(marker), "path": str(built.folder), "new": built.new})
        return DONE
    how = f"built in {marker.build_seconds:.0f} s" if built.new else "was here"
    output.line(f"{name} ({chosen})  {built.folder}  {_size(marker.size_bytes)}  {how}")
    return DONE


@env.command("check")
@click.argument("name")
@_variant
@json_option
def check_environment(name: str, variant: str, as_json: bool) -> int:
    """Check that the environment NAME works: its pins, its imports, a small program. Exit code 1 if it does not.

    Without --variant every variant that is built. Workers use no environment whose last check failed.
    """
    from gpuflow.cli import output
    from gpuflow.environments import examine, standings

    settings, definition = _load(name)
    if variant != "auto":
        _choose(definition, variant)
    found = [one for one in standings(settings, name) if variant in ("auto", one.variant)]
    built = [one for one in found if one.marker is not None or (one.variant is None and variant == "auto")]
    rows: list[dict[str, Any]] = []
    for standing in built:
        finding = examine(settings, standing)
        problem = finding.problem if finding else standing.detail
        mend = _mend(standing) if problem else ""
        rows.append(
            {
                "name": name,
                "variant": standing.variant,
                "ok": not problem,
                "problem": problem,
                "mend": mend,
                "versions": dict(finding.versions) if finding else {},
                "seconds": round(finding.seconds, 1) if finding else 0.0,
            }
        )
    if not rows:
        mend = next((one.mend for one in found), f"gpuflow env create {name}")
        rows = [{"name": name, "variant": None, "ok": False, "problem": "is not built", "mend": f"run `{mend}`"}]
    if as_json:
        output.emit_json(rows)
    else:
        for row in rows:
            label = f"{name} ({row['variant'] or ('installed' if built else '-')})"
            if row["ok"]:
                versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items() if version)
                output.line(f"{label}  ok  {versions}")
            else:
                output.line(f"{label}  fail  {row['problem']}; {row['mend']}")
    return DONE if all(row["ok"] for row in rows) else FAILED


def _mend(standing: Standing) -> str:
    if standing.variant is None:
        return 'pip install "gpuflow[train]" beside gpuflow, or run `gpuflow env create default`'
    again = "" if standing.status == "outdated" else " --force"
    return f"run `gpuflow env create {standing.name} --variant {standing.variant}{again}`"


@env.command("remove")
@click.argument("name")
@_variant
def remove_environment(name: str, variant: str) -> None:
    """Remove the environment NAME from this machine (without --variant every variant), unless a task uses it.

    What was built goes too when its definition has gone, or is wrong now.
    """
    from gpuflow.cli import output
    from gpuflow.environments import Place, UnknownEnvironment, removable
    from gpuflow.settings import Settings

    settings = Settings.load()
    try:
        there = removable(settings, name)
    except UnknownEnvironment as error:
        raise bad_input(str(error)) from error
    if variant != "auto" and there and variant not in there:
        raise bad_input(f"environment {name} has no variant {variant} here; it has {', '.join(there)}")
    variants = [one for one in there if variant in ("auto", one)]
    gone = [(one, marker) for one in variants if (marker := Place(settings, name, one).remove()) is not None]
    for one, marker in gone:
        output.line(f"{name} ({one})  {_size(marker.size_bytes)} freed")
    if not gone:
        output.note(f"{name} is not built here")


@env.command("path")
@click.argument("name")
@_variant
def path_of_environment(name: str, variant: str) -> None:
    """Print the folder of the environment NAME (its Python is bin/python in it)."""
    from gpuflow.cli import output
    from gpuflow.environments import python_of

    settings, definition = _load(name)
    chosen = _choose(definition, variant)
    python = python_of(settings, name, gpus=chosen == "cuda")
    output.line(python.parent.parent)


@env.command("requirements")
@click.argument("name")
@_variant
def requirements_of_environment(name: str, variant: str) -> None:
    """Print the pins of the environment NAME, for `pip download -r`, to fill a wheelhouse."""
    from gpuflow.cli import output

    _, definition = _load(name)
    for pin in definition.recipe(_choose(definition, variant)).pins:
        output.line(pin)


def _load(name: str) -> tuple[Settings, Definition]:
    from gpuflow.environments import UnknownEnvironment, load
    from gpuflow.settings import Settings

    settings = Settings.load()
    try:
        return settings, load(settings, name)
    except UnknownEnvironment as error:
        raise bad_input(str(error)) from error


def _choose(definition: Definition, variant: str) -> Variant:
    """Return the variant that is meant: `auto` is cuda where this machine has a GPU, if there is such a variant."""
    if variant == "auto":
        from gpuflow.fleet.hardware import probe

        if "cuda" in definition.variants and ("cpu" not in definition.variants or probe().gpus):
            return "cuda"
        return "cpu"
    for one in definition.variants:
        if one == variant:
            return one
    raise bad_input(f"environment {definition.name} has no variant {variant}; it has {', '.join(definition.variants)}")


def _size(count: Any) -> str:
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end a build as Ctrl-C does, so that it leaves nothing."""
    import signal

    def end(number: int, _: object) -> None:
        raise Terminated(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[Progress], None]]:
    """Give what shows how far a build is: a bar on a terminal, lines elsewhere, both on stderr."""
    import sys

    if not sys.stderr.isatty():
        yield _lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from gpuflow.terminal import one_line

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=None, count="")

        def show(one: Any) -> None:
            text = f"{label}  {one_line(one.phase, 60)}"
            bars.update(bar, description=text, completed=one.done, total=one.total, count=_count(one))

        yield show


def _lines(label: str, clock: Callable[[], float] = time.monotonic) -> Callable[[Progress], None]:
    from gpuflow.cli.output import note

    last: dict[str, Any] = {"phase": None, "at": 0.0}

    def show(one: Progress) -> None:
        now = clock()
        # With what is fetched the phase changes with every package; what is installed and checked is a step.
        step = one.phase if one.unit != "MB" else "fetching"
        if step != last["phase"] or now - last["at"] >= _SILENCE_SECONDS:
            note(f"{label}: {one.phase}  {_count(one)}".rstrip())
            last.update(phase=step, at=now)

    return show


def _count(one: Progress) -> str:
    if one.total is not None:
        return f"{one.done:.0f} of {one.total:.0f} {one.unit}"
    return f"{one.done:.1f} {one.unit}" if one.unit and one.done else ""
