"""`python -m executors.models`: fetches, lists and removes models and data sets before or after a task needs them.

Run by `gpuflow models` and by the worker's housekeeping, which load no library of the executors themselves. With
--json, stdout carries the events of the protocol and ends with `finish`; without, lines for people. Exit codes as those
of `python -m executors`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from executors import cancellation, models_here
from executors.base import bad_input, plain
from executors.cache import cache_root
from executors.cache_trim import trim
from executors.failures import classify
from executors.modeling import hub
from gpuflow.errors import GPUFlowError
from gpuflow.protocol import Emitter
from gpuflow.spec.presets import list_presets, load_preset


class _Terminal(Emitter):
    """Shows events to a person: one line a status, and a share that is redrawn on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._open_line = False

    def emit(self, name: str, /, **data: Any) -> None:
        if name == "worker" and data.get("message"):
            self._say(data["message"])
        elif name == "progress" and data.get("total") and self._stream.isatty():
            share = f"\r{data['current'] / 1e6:8.1f} of {data['total'] / 1e6:.1f} MB"
            self._stream.write(share)
            self._stream.flush()
            self._open_line = True
        elif name == "result":
            for row in data["value"].get("models", ()):
                self._say(f"{row['name']:28} {row.get('path') or row.get('source', '')}")

    def _say(self, text: str) -> None:
        self._stream.write(("\n" if self._open_line else "") + text + "\n")
        self._stream.flush()
        self._open_line = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = _parser().parse_args(argv)
    emitter = Emitter.claim_stdout() if arguments.json else _Terminal(sys.stdout)
    try:
        cancellation.install()
        result = _COMMANDS[arguments.command](arguments, emitter)
    except cancellation.Cancelled:
        cancellation.ignore()
        emitter.finish("cancelled")
        return 143
    except Exception as error:  # noqa: BLE001  (every failure becomes one line)
        cancellation.ignore()
        record = plain(classify(error))
        emitter.finish("failed", record)
        print(record["message"], file=sys.stderr)
        return 2 if isinstance(error, GPUFlowError) else 1
    cancellation.ignore()
    emitter.result(result)
    emitter.finish("completed")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m executors.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("pull", "fetch presets and models of the hub"),
        ("rm", "remove them from the cache"),
        ("describe", "say which files of the cache they are"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("names", nargs="+", help="a preset of a model or of data, or organisation/name[@revision]")
    commands.add_parser("list", help="list the presets and what is in the cache")
    commands.add_parser("where", help="say where the entries of presets and of the hub belong")
    commands.add_parser("trim", help="remove what was used longest ago")
    for name, command in commands.choices.items():
        command.add_argument("--cache-dir", default=None, help="default: $GPUFLOW_CACHE_DIR or ~/.cache/gpuflow")
        command.add_argument("--json", action="store_true", help="events of the protocol on stdout")
        if name in ("pull", "trim"):
            command.add_argument("--max-bytes", type=int, required=name == "trim", help="most that the cache may take")
    return parser


def _pull(arguments: argparse.Namespace, emitter: Emitter) -> dict[str, Any]:
    rows = []
    for name in arguments.names:
        row = _pull_one(name, arguments.cache_dir, emitter)
        emitter.status("working", f"{name} is in {row['path']}")
        rows.append(row)
    if arguments.max_bytes is not None:
        _trim(arguments, emitter)
    return {"models": rows}


def _pull_one(name: str, cache_dir: str | None, emitter: Emitter) -> dict[str, Any]:
    if name in list_presets("datasets"):
        from executors.data.presets import prepare as prepare_data

        path = prepare_data(name, load_preset("datasets", name), cache_dir, emitter)
        return {"name": name, "kind": "datasets", "path": str(path)}
    parsed = hub.parse_name(name)
    if parsed is not None:
        source = {"identifier": parsed[0], "revision": parsed[1]}
        return {"name": name, "kind": "hub", "path": hub.pull(source, cache_dir, emitter)}
    preset = load_preset("models", name)
    if preset["source"]["type"] == "huggingface":
        return {"name": name, "kind": "models", "path": hub.pull(preset["source"], cache_dir, emitter)}
    from executors.modeling.presets import prepare as prepare_model

    return {"name": name, "kind": "models", "path": str(prepare_model(name, preset, cache_dir, emitter))}


def _list(arguments: argparse.Namespace, _: Emitter) -> dict[str, Any]:
    return {"models": models_here.rows(arguments.cache_dir)}


def _describe(arguments: argparse.Namespace, _: Emitter) -> dict[str, Any]:
    return {"entries": [models_here.describe(name, arguments.cache_dir) for name in arguments.names]}


def _where(arguments: argparse.Namespace, _: Emitter) -> dict[str, Any]:
    return models_here.places(arguments.cache_dir)


def _remove(arguments: argparse.Namespace, emitter: Emitter) -> dict[str, Any]:
    removed = []
    for name in arguments.names:
        freed = models_here.remove(name, arguments.cache_dir)
        removed.append({"name": name, "freed_bytes": freed})
        emitter.status("working", f"removed {name} ({freed / 1e6:.1f} MB)")
    return {"removed": removed}


def _trim(arguments: argparse.Namespace, emitter: Emitter) -> dict[str, Any]:
    if arguments.max_bytes < 0:
        raise bad_input("--max-bytes is below 0")
    removed = trim(
        cache_root(arguments.cache_dir), arguments.max_bytes, tell=lambda text: emitter.status("working", text)
    )
    return {"removed": [{"name": entry.label, "freed_bytes": entry.size_bytes} for entry in removed]}


_COMMANDS = {
    "pull": _pull,
    "list": _list,
    "rm": _remove,
    "describe": _describe,
    "where": _where,
    "trim": _trim,
}


if __name__ == "__main__":
    sys.exit(main())
