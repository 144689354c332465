"""User data on the wire: what Celery's JSON would change or refuse, or what UTF-8 cannot hold, arrives as it can.

kombu's JSON takes each mapping of exactly `__type__` and `__value__` for a value of a Python type. A user's own mapping
of that form travels as one of a type of ours, whose reader gives it back unchanged. Half a surrogate pair, which no
UTF-8 text can hold, becomes U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kombu.utils.json import dumps, register_type

from gpuflow.protocol import whole_text

#: kombu's name of the type that stands for a user's mapping.
MAPPING: Final = "gpuflow.mapping"
_FORM: Final = frozenset({"__type__", "__value__"})
#: What the JSON (in ASCII) of a value has that needs care: such a mapping, or a surrogate, whole pairs included.
_NEEDS_CARE: Final = re.compile(r'"__type__"|\\ud[89a-f]', re.IGNORECASE)


class _Mapping:
    """What kombu registers the type by; there are no objects of it."""


register_type(_Mapping, MAPPING, vars, dict)


def needs_care(text: str) -> bool:
    """Whether a value has to go through `portable`, by its JSON as kombu writes it."""
    return _NEEDS_CARE.search(text) is not None


def portable(value: Any) -> Any:
    """Return a value that kombu's JSON carries to a reader of ours as it is; mostly the value itself."""
    return wrapped(value) if needs_care(dumps(value)) else value


def wrapped(value: Any) -> Any:
    """Return a copy of JSON-able data in which each mapping that looks like a type of kombu's is one of ours."""
    if isinstance(value, Mapping):
        pairs = {whole_text(key) if isinstance(key, str) else key: wrapped(item) for key, item in value.items()}
        if pairs.keys() == _FORM:
            return {"__type__": MAPPING, "__value__": [list(pair) for pair in pairs.items()]}
        return pairs
    if isinstance(value, list | tuple):
        return [wrapped(item) for item in value]
    return whole_text(value) if isinstance(value, str) else value
