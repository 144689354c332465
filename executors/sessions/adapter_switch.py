"""Adapters of the transformers engine: put on the one loaded model for a batch, kept for the next. One thread only.

One that does not fit is refused, and leaves nothing on the model: whoever asks without one is answered as before.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from executors.sessions.adapter_layers import read_config, strip, with_adapter
from executors.sessions.adapters import Adapter

#: Sets of adapters that stay on the model; the one that was used longest ago makes room.
_KEPT: Final = 8


def key_of(adapters: Sequence[Adapter]) -> str:
    """Return what is equal for equal sets of adapters; empty for none."""
    return "-".join(f"{one.digest}x{one.weight:g}" for one in adapters)


class AdapterSwitch:
    """A model that acts with the adapters of whoever uses it; `headless`: it was loaded without its output layer."""

    def __init__(self, model: Any, *, headless: bool = False) -> None:
        self._model = model
        self._headless = headless
        self._tuned: Any = None
        self._kept: OrderedDict[str, list[str]] = OrderedDict()

    @contextlib.contextmanager
    def using(self, adapters: Sequence[Adapter]) -> Iterator[Any]:
        """Give the model with these adapters, and no others, as long as the block runs."""
        if not adapters:
            with contextlib.nullcontext() if self._tuned is None else self._tuned.disable_adapter():
                yield self._model if self._tuned is None else self._tuned
            return
        name = _safe(key_of(adapters))
        if name not in self._kept:
            self._put(name, adapters)
        self._kept.move_to_end(name)
        self._tuned.set_adapter(name)
        self._tuned.eval()
        yield self._tuned

    def _put(self, name: str, adapters: Sequence[Adapter]) -> None:
        plain = len(adapters) == 1 and adapters[0].weight == 1
        parts = [name] if plain else [f"{name}_{number}" for number in range(len(adapters))]
        configs = [read_config(adapter.path, self._model, headless=self._headless) for adapter in adapters]
        try:
            for part, adapter, config in zip(parts, adapters, configs, strict=True):
                self._tuned = with_adapter(
                    self._model, self._tuned, part, adapter.path, config, headless=self._headless
                )
            if not plain:
                weights = [one.weight for one in adapters]
                self._tuned.add_weighted_adapter(parts, weights, name, combination_type="cat")
        except Exception:
            # What an adapter that fits in part has left is in no order that could be undone: all of it goes.
            self._tuned = None
            self._kept.clear()
            strip(self._model)
            raise
        self._kept[name] = [*dict.fromkeys([*parts, name])]
        while len(self._kept) > _KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._drop(set(oldest))

    def _drop(self, names: set[str]) -> None:
        for name in names & set(self._tuned.peft_config):
            self._tuned.delete_adapter(name)


def _safe(key: str) -> str:
    """A name that may be part of a module's name."""
    return "a" + "".join(letter if letter.isalnum() else "_" for letter in key)
