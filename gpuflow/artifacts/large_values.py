"""Large inline data of a spec: stored once, by digest, and a reference in its place.

Called by the client for templates and by the submission for every task, so that neither a record nor a message holds
megabytes. What is stored is data: nothing in it is replaced later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpuflow.artifacts.references import INLINE_BYTES, is_reference, json_bytes, store_value
from gpuflow.artifacts.store import Store
from gpuflow.artifacts.uploads import NO_STORE
from gpuflow.errors import InvalidTemplate
from gpuflow.logs import get_logger
from gpuflow.spec import Template
from gpuflow.spec.function_section import is_function
from gpuflow.spec.reading import MAX_BYTES as TEXT_BYTES
from gpuflow.spec.references import is_pending, resolve, resolve_env

log = get_logger("gpuflow.data")

#: Fields of `data` that hold inline data.
DATA_FIELDS: Final = ("items", "prompts", "preferences", "messages")
#: Largest inline data of a fleet without a store, in bytes of JSON.
MAX_INLINE_BYTES: Final = 64 << 20


def refer_large(
    spec: Mapping[str, Any], open_store: Callable[[], Store | None], *, at_dispatch: bool = True
) -> dict[str, Any]:
    """Return the spec with each field of `data` whose JSON is over 1 MiB as a reference.

    Before dispatch (`at_dispatch` False) a value that names results of other stages stays as it is. `${env:NAME}` is
    for the child, so a value with one stays too. Without a store values stay inline, with a warning, up to 64 MiB.
    Raises InvalidTemplate for larger ones, ArtifactError when the store fails.
    """
    done = dict(spec)
    data = done.get("data")
    if isinstance(data, Mapping):
        fresh = {
            name: _referred(value, name, open_store, at_dispatch=at_dispatch) if name in DATA_FIELDS else value
            for name, value in data.items()
        }
        done["data"] = fresh
    return done


def refer_large_matrix(
    matrix: Mapping[str, list[Any]] | None, open_store: Callable[[], Store | None]
) -> dict[str, list[Any]] | None:
    """Return the matrix of a stage with large values of `data.<field>` and `data` as references, as `refer_large`."""
    if matrix is None:
        return None
    fresh: dict[str, list[Any]] = {}
    for path, values in matrix.items():
        top, _, field = path.partition(".")
        if path == "data" and isinstance(values, list):
            fresh[path] = [refer_large({"data": one}, open_store, at_dispatch=False)["data"] for one in values]
        elif top == "data" and field in DATA_FIELDS and isinstance(values, list):
            fresh[path] = [_referred(one, field, open_store, at_dispatch=False) for one in values]
        else:
            fresh[path] = values
    return fresh


def refuse_large_arguments(template: Template) -> None:
    """Raise InvalidTemplate for arguments of a function that the record of a pipeline is not to hold.

    Each step of the pipeline reads that record. Those of a single call go to the store, as Celery's do.
    """
    for stage in template.stages:
        size = len(json_bytes([stage.spec, stage.matrix])) if is_function(stage.spec) else 0
        if size > TEXT_BYTES:
            raise InvalidTemplate(
                f"stage {stage.name!r}: the arguments of its function have {size / (1 << 20):.0f} MiB, more than the "
                f"{TEXT_BYTES >> 20} MiB of a template; name a file, or let a stage before it return them"
            )


def _referred(value: Any, name: str, open_store: Callable[[], Store | None], *, at_dispatch: bool) -> Any:
    if not isinstance(value, list) or is_reference(value):
        return value
    content = json_bytes(value)
    if len(content) <= INLINE_BYTES or (_is_live(value, at_dispatch) and len(content) <= MAX_INLINE_BYTES):
        return value
    mebibytes = len(content) / (1 << 20)
    if _is_live(value, at_dispatch):
        raise InvalidTemplate(f"data.{name} has {mebibytes:.0f} MiB and references in it; put plain data into a file")
    store = open_store()
    if store is None:
        if len(content) > MAX_INLINE_BYTES:
            raise InvalidTemplate(f"data.{name} has {mebibytes:.0f} MiB: {NO_STORE}")
        log.warning("large_inline_data", field=f"data.{name}", mebibytes=round(mebibytes, 1), mend=NO_STORE)
        return value
    plain = resolve_env(value if at_dispatch else resolve(value, _never), {})
    return store_value(plain, json_bytes(plain), name, store)


def _is_live(value: Any, at_dispatch: bool) -> bool:
    """Whether a text in it is still to be replaced."""
    if isinstance(value, str):
        return is_pending(value, at_dispatch=at_dispatch)
    if isinstance(value, Mapping):
        return any(_is_live(item, at_dispatch) for item in value.values())
    return isinstance(value, list) and any(_is_live(item, at_dispatch) for item in value)


def _never(reference: Any) -> Any:
    raise AssertionError(f"{reference} in data without references")
