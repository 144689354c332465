"""Large arguments of a team's functions: stored once, by digest, and a reference in the message.

So neither a message nor the memory of the broker holds megabytes, as `large_values` sees to for templates. The worker
loads them before it starts the child.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kombu.exceptions import EncodeError
from kombu.utils.json import dumps

from gpuflow.artifacts.references import INLINE_BYTES, References, is_reference, json_bytes, store_value
from gpuflow.artifacts.store import Store
from gpuflow.artifacts.uploads import NO_STORE
from gpuflow.logs import get_logger

log = get_logger("gpuflow.data")

#: The one named argument of a call whose arguments lie in a store.
ARGUMENTS: Final = "$arguments"


def refer_arguments(
    name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any], open_store: Callable[[], Store | None]
) -> dict[str, Any] | None:
    """Store the arguments of a call of the function `name` whose JSON is over 1 MiB, and return their reference.

    None for smaller ones, for what is no JSON, which Celery refuses, and, with a warning, without a store. Raises
    ArtifactError when the store fails.
    """
    try:
        text = dumps([list(args or ()), dict(kwargs)])
    except (TypeError, ValueError, EncodeError):
        return None
    if len(text) <= INLINE_BYTES:
        return None
    store = open_store()
    if store is None:
        log.warning("large_arguments", name=name, mebibytes=round(len(text) / (1 << 20), 1), mend=NO_STORE)
        return None
    value = json.loads(text)
    return store_value(value, json_bytes(value), "arguments", store)


def load_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], references: References) -> str | None:
    """Return the JSON of [args, kwargs] of a call that came with a reference, None for others. Raises ArtifactError."""
    if args or set(kwargs) != {ARGUMENTS} or not is_reference(kwargs[ARGUMENTS]):
        return None
    return json.dumps(references.load(kwargs[ARGUMENTS]))
