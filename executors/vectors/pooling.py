"""How the vectors of a text's tokens become one: as files of sentence-transformers say, else their mean.

Imports no torch; the files of a model of the hub come through transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from executors.base import bad_input
from executors.modeling.location import Location

Mode = Literal["mean", "cls", "last", "max"]
_MODES: Final[Mapping[str, Mode]] = {
    "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last", "max": "max",
    "max_tokens": "max",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """`normalize`: to the length 1. `max_tokens`: longer texts are cut; None is what the model takes."""

    mode: Mode = "mean"
    normalize: bool = True
    max_tokens: int | None = None


def read_pooling(location: Location) -> Pooling:
    """Return how a model's vectors are pooled. Raises ExecutorError: BadInput for what is not done here."""
    modules = _json(location, "modules.json")
    if modules is None:
        return Pooling()
    kinds = {str(module["type"]).rpartition(".")[2]: str(module.get("path") or "") for module in modules}
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unknown or "Pooling" not in kinds:
        raise bad_input(
            f"{location.name} has the module {(unknown or ['none for pooling'])[0]}; only Transformer, Pooling and "
            "Normalize are done here"
        )
    settings = _json(location, f"{kinds['Pooling']}/config.json") or {}
    limits = _json(location, "sentence_bert_config.json") or {}
    return Pooling(
        mode=_mode(settings, location.name),
        normalize="Normalize" in kinds,
        max_tokens=limits.get("max_seq_length"),
    )


def _mode(settings: Mapping[str, Any], model: str) -> Mode:
    named = settings.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else [key[13:] for key, on in settings.items() if _is_on(key, on)]
    if len(chosen) == 1 and chosen[0] in _MODES:
        return _MODES[chosen[0]]
    raise bad_input(f"{model} pools by {' and '.join(map(str, chosen)) or 'nothing'}; here: {', '.join(_MODES)}")


def _is_on(key: str, value: Any) -> bool:
    return key.startswith("pooling_mode_") and value is True


def _json(location: Location, name: str) -> Any:
    if Path(location.place).is_dir():
        path = Path(location.place) / name
        return json.loads(path.read_text("utf-8")) if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        location.place,
        name,
        revision=location.options.get("revision"),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(found).read_text("utf-8")) if found else None
