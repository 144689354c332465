"""The models that this worker has used lately, and so has on disk or loaded: it takes their tasks first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

#: So many models are remembered; the oldest is forgotten first.
MOST_MODELS: Final = 32


class RecentModels:
    """Names of models (`routing.affinity.model_key`). Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    def used(self, name: str) -> None:
        """Note that a model was loaded here; "" is none."""
        with self._lock:
            if not name:
                return
            self._names.pop(name, None)
            self._names[name] = None
            while len(self._names) > MOST_MODELS:
                self._names.popitem(last=False)

    def names(self) -> tuple[str, ...]:
        """Return the models, the latest last."""
        with self._lock:
            return tuple(self._names)
