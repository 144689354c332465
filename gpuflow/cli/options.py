"""Options that several commands share, and what they do to a template."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import bad_input

if TYPE_CHECKING:
    from gpuflow.spec import Template
    from gpuflow.spec.report import Check

_TOP: Final = frozenset({"apiVersion", "kind", "metadata", "spec"})

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Set a field: training.max_steps=20 (repeatable)."
)
label_option = click.option(
    "--label", "labels", multiple=True, metavar="K=GLOB", help="Run only where the label matches (repeatable)."
)
include_option = click.option(
    "--include", multiple=True, metavar="MODULE", help="Modules with Celery tasks of yours, by commas (repeatable)."
)


def modules_of(include: Iterable[str]) -> list[str]:
    """Return the modules that `--include` names."""
    return [name.strip() for given in include for name in given.split(",") if name.strip()]


def template_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument FILE and the options that change a template."""
    return click.argument("source", metavar="FILE")(set_option(label_option(command)))


def load_template(source: str, overrides: Iterable[str] = (), labels: Iterable[str] = ()) -> Template:
    """Return the checked template of a path, of `-` (stdin) or of a shipped name, with the options applied.

    That the local files that it names are there is checked too. Raises InvalidTemplate, click.UsageError.
    """
    from gpuflow.artifacts.uploads import checked_uploads, upload_checks

    template = _loaded(source, overrides, labels, upload_checks(source))
    checked_uploads(template)  # those that the sections do not show: of matrices, beside references
    return template


def _loaded(source: str, overrides: Iterable[str], labels: Iterable[str], own: Mapping[str, Check]) -> Template:
    from gpuflow.errors import InvalidTemplate
    from gpuflow.spec.report import invalid
    from gpuflow.templates import parse, parse_text

    changes = [_assignment("--set", text) for text in overrides]
    asked = [_assignment("--label", text) for text in labels]
    if not changes and not asked:
        return parse_text(_stdin(), "stdin", more=own) if source == "-" else parse(source, more=own)
    data = _raw(source)
    for path, value in changes:
        data = override(data, path, value)
    for key, glob in asked:
        data = add_label(data, key, glob)
    try:
        return dataclasses.replace(parse(data, more=own), source=source)
    except InvalidTemplate as error:
        # The lines of the file are those of what was written, not of what the options made of it.
        raise invalid(source, error.mistakes, error.warnings) if error.mistakes else error from None


def override(data: Mapping[str, Any], path: str, text: str) -> dict[str, Any]:
    """Return the template with `path` set to `text`, read as YAML.

    A path begins below `spec` unless it names a top-level field; an entry of a list may be named by its `name`
    (`stages.tune.training.max_steps`). Raises click.UsageError.
    """
    from gpuflow.spec import set_path
    from gpuflow.spec.matrix import parse_path

    try:
        steps = parse_path(path)
        if "spec" in data and steps[0] not in _TOP:
            steps = ("spec", *steps)
        return set_path(data, _numbered(data, steps), _value(text))
    except ValueError as error:
        raise bad_input(f"--set {path}: {error}; name a field that the template can have") from error


def add_label(data: Mapping[str, Any], key: str, glob: str) -> dict[str, Any]:
    """Return the template with a label added to `resources.labels`. Raises click.UsageError."""
    from gpuflow.spec import set_path

    spec = data.get("spec") if "spec" in data else data
    resources = (spec.get("resources") if isinstance(spec, Mapping) else None) or {}
    if not isinstance(resources, Mapping):
        raise bad_input("--label needs `resources` to be a mapping; write resources: {accelerators: ...}")
    labels = {**(resources.get("labels") or {}), key: glob}
    path = ("spec", "resources") if "spec" in data else ("resources",)
    return set_path(data, path, {**resources, "labels": labels})


def _numbered(data: Any, steps: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Turn names of list entries into their numbers; a stage's fields are those of its `spec`."""
    found: list[str | int] = []
    at = data
    remaining = list(steps)
    while remaining:
        step = remaining.pop(0)
        if isinstance(at, list) and isinstance(step, str):
            names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in at]
            if step not in names:
                raise ValueError(f"there is no {step!r} in {', '.join(str(name) for name in names if name) or 'it'}")
            step = names.index(step)
            if remaining and remaining[0] not in ("spec", "name", "dependsOn", "matrix"):
                remaining.insert(0, "spec")
        found.append(step)
        if isinstance(at, Mapping):
            at = at.get(str(step))
        elif isinstance(at, list) and isinstance(step, int) and step < len(at):
            at = at[step]
        else:
            at = None
    return tuple(found)


def _value(text: str) -> Any:
    """Read a value as YAML would: a scalar, or a list or mapping in flow style."""
    from gpuflow.spec.reading import read_text
    from gpuflow.spec.yaml_reader import scalar_value

    if text[:1] in "[{\"'" and text:
        return read_text(text, "--set").data
    return scalar_value(text.strip())


def _raw(source: str) -> Mapping[str, Any]:
    """Return the unchecked data of a template. Raises InvalidTemplate."""
    from pathlib import Path

    from gpuflow.errors import InvalidTemplate
    from gpuflow.spec.presets import list_presets, preset_document
    from gpuflow.spec.reading import read_file, read_text
    from gpuflow.templates import parse

    if source == "-":
        document = read_text(_stdin(), "stdin")
    elif not Path(source).exists() and source in list_presets("pipelines"):
        document = preset_document("pipelines", source)
    elif Path(source).exists():
        document = read_file(Path(source))
    else:
        parse(source)  # raises, naming what is near
        raise InvalidTemplate(f"{source}: no such file")
    if not isinstance(document.data, Mapping):
        parse(source)
        raise InvalidTemplate(f"{source}: a template is a mapping with apiVersion, metadata and spec")
    return document.data


def _stdin() -> str:
    from gpuflow.errors import InvalidTemplate
    from gpuflow.spec.reading import MAX_BYTES

    raw: bytes = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InvalidTemplate(f"stdin: has more than the {MAX_BYTES >> 20} MiB of a template; name its data by path")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidTemplate(f"stdin: is not UTF-8 (byte {error.start}); send it as UTF-8") from error


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise bad_input(f"{option} {text!r} has no value; write {option} NAME=VALUE")
    return name.strip(), value


def show_warnings(template: Template) -> None:
    """Tell on stderr what of the template is not used."""
    from gpuflow.cli.output import note
    from gpuflow.spec.report import line_text

    for warning in template.warnings:
        note(f"warning: {line_text(template.source, warning)}")


def show_filled(template: Template) -> None:
    """Tell on stderr what a foreign template leaves out, and how it was filled in."""
    from gpuflow.cli.output import note
    from gpuflow.spec.report import line_text

    for one in template.filled:
        note(line_text(template.source, one))
