"""`python -m executors.models pull NAME` and `list`: prepares model and data presets before a task needs them.

With --json, stdout carries the events of the protocol and ends with `finish`; without, lines for people. Exit codes as
those of `python -m executors`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from executors import cancellation
from executors.base import ExecutorError, plain
from executors.failures import classify
from executors.offline import not_here, offline
from gpuflow.errors import GPUFlowError
from gpuflow.protocol import Emitter
from gpuflow.spec.presets import list_presets, load_preset


class _Terminal(Emitter):
    """Shows events to a person: one line a status, and a share that is redrawn on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._open_line = False

    def emit(self, name: str, **data: Any) -> None:
        if name == "worker" and data.get("message"):
            self._say(data["message"])
        elif name == "progress" and data.get("total") and self._stream.isatty():
            share = f"\r{data['current'] / 1e6:8.1f} of {data['total'] / 1e6:.1f} MB"
            self._stream.write(share)
            self._stream.flush()
            self._open_line = True
        elif name == "result":
            self._say(f"{data['value']['name']} is in {data['value']['path']}")

    def _say(self, text: str) -> None:
        self._stream.write(("\n" if self._open_line else "") + text + "\n")
        self._stream.flush()
        self._open_line = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = _parser().parse_args(argv)
    emitter = Emitter.claim_stdout() if arguments.json else _Terminal(sys.stdout)
    if arguments.command == "list":
        _list(emitter, arguments)
        return 0
    try:
        cancellation.install()
        result = _pull(arguments.name, arguments.cache_dir, emitter)
    except cancellation.Cancelled:
        cancellation.ignore()
        emitter.finish("cancelled")
        return 143
    except Exception as error:  # noqa: BLE001  (every failure becomes one line)
        record = plain(classify(error))
        emitter.finish("failed", record)
        print(f"{arguments.name}: {record['message']}", file=sys.stderr)
        return 2 if isinstance(error, GPUFlowError) else 1
    cancellation.ignore()
    emitter.result(result)
    emitter.finish("completed")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m executors.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pull = commands.add_parser("pull", help="fetch and convert a preset")
    pull.add_argument("name", help="a model preset, or a data preset")
    listing = commands.add_parser("list", help="list the presets that are prepared here")
    for command in (pull, listing):
        command.add_argument("--cache-dir", default=None, help="default: $GPUFLOW_CACHE_DIR or ~/.cache/gpuflow")
        command.add_argument("--json", action="store_true", help="events of the protocol on stdout")
    return parser


def _pull(name: str, cache_dir: str | None, emitter: Emitter) -> dict[str, Any]:
    if name in list_presets("datasets"):
        from executors.data.presets import prepare as prepare_data

        path = prepare_data(name, load_preset("datasets", name), cache_dir, emitter)
        return {"name": name, "kind": "datasets", "path": str(path)}
    preset = load_preset("models", name)
    source = preset["source"]
    if source["type"] == "huggingface":
        return {"name": name, "kind": "models", "path": _pull_from_hub(source, emitter)}
    from executors.modeling.presets import prepare as prepare_model

    return {"name": name, "kind": "models", "path": str(prepare_model(name, preset, cache_dir, emitter))}


def _pull_from_hub(source: dict[str, Any], emitter: Emitter) -> str:
    from executors.modeling.libraries import prepare_libraries

    if offline():
        raise ExecutorError("Offline", not_here(str(source["identifier"])))
    prepare_libraries()
    from huggingface_hub import snapshot_download

    emitter.status("loading", f"fetching {source['identifier']} from the hub")
    return str(snapshot_download(source["identifier"], revision=source.get("revision")))


def _list(emitter: Emitter, arguments: argparse.Namespace) -> None:
    rows = [_row(name, arguments.cache_dir) for name in list_presets("models")]
    if arguments.json:
        emitter.result({"models": rows})
        return
    for row in rows:
        print(f"{row['name']:28} {'ready' if row['path'] else row['source']:12} {row['description']}")


def _row(name: str, cache_dir: str | None) -> dict[str, Any]:
    from executors.modeling.presets import prepared_folder

    preset = load_preset("models", name)
    source = preset["source"]
    path: Path | None = prepared_folder(name, preset, cache_dir) if source["type"] == "wheel" else None
    ready = str(path) if path is not None and path.is_dir() else None
    return {"name": name, "source": source["type"], "path": ready, "description": preset.get("description", "")}


if __name__ == "__main__":
    sys.exit(main())
