"""`${env:NAME}` in what a worker itself reads of a spec: destination, checkpoint, adapters, index, reward.

Called by `destination` and `inputs`, which read those fields, and by whoever builds the task's redactor. The child
replaces all others. Pure: the values come in as a mapping, which the worker makes of the same sources as the child's
environment; None stands for "not known here" and leaves every text as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.secrets import Redactor, is_secret_variable, secrets_in_spec
from gpuflow.spec.references import find_references, resolve_env

#: The fields of a spec that a worker reads before there is a child.
_PLACES: Final = (
    ("output", "destination"),
    ("checkpoint", "load"),
    ("model", "adapters"),
    ("search", "index"),
    ("reward_model",),
)


def filled(value: Any, environment: Mapping[str, str] | None) -> Any:
    """Return a value with its `${env:NAME}` replaced. Raises UnresolvedReference for a name that is not there."""
    return value if environment is None else resolve_env(value, environment)


def names_secret(spec: Mapping[str, Any], value: Any) -> str | None:
    """Return the first name in `value` that stands for a secret: one of the task's `secrets`, or by its name."""
    declared = spec.get("secrets") or ()
    names = (ref.name for ref in find_references(value) if ref.kind == "env")
    return next((name for name in names if name in declared or is_secret_variable(name)), None)


def placeholder_secrets(spec: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what has to be hidden of the values that stand in those fields.

    Those of secret names; whatever stands in a header, in the user part of a URL, or after its `?`: there a plain name
    holds a secret too. A bucket or a folder by an ordinary name is none.
    """
    for text, is_header in _texts(spec):
        for ref in find_references(text):
            if ref.kind != "env" or ref.name not in environment:
                continue
            signed = any(ref.text in part for part in text.split("?")[1:])
            if is_header or signed or names_secret(spec, ref.text):
                yield environment[ref.name]
        with contextlib.suppress(GPUFlowError):
            yield from secrets_in_spec({"url": resolve_env(text, environment)})


@contextlib.contextmanager
def hiding(spec: Mapping[str, Any], environment: Mapping[str, str] | None) -> Iterator[None]:
    """Hide those values in the message of an error of ours that leaves the block."""
    try:
        yield
    except GPUFlowError as error:
        if environment is not None:
            redactor = Redactor(placeholder_secrets(spec, environment))
            error.args = tuple(redactor.text(part) if isinstance(part, str) else part for part in error.args)
        raise


def _texts(spec: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is a header) of those fields."""
    for place in _PLACES:
        found: Any = spec
        for name in place:
            found = found.get(name) if isinstance(found, Mapping) else None
        found = found or ()
        for item in [found] if isinstance(found, Mapping) else found:
            if isinstance(item, Mapping):
                yield from ((value, False) for value in item.values() if isinstance(value, str))
                yield from ((str(value), True) for value in (item.get("headers") or {}).values())
