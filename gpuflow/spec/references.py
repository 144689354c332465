r"""References: `${stage.result.field}` to what another stage gave, `${env:NAME}` to the child's environment.

Anyone may call it, executors included; it imports the standard library and the error tree alone.

A run of `$` before `{` decides: one `$` is a reference, each further one escapes (`$${x}` is the text `${x}`). What an
upstream stage gave is put in as data: text in it that looks like a reference is escaped, so that a model's output can
never read the environment of the next child. `resolve` is called at dispatch, `resolve_env` last, in the child.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from gpuflow.errors import GPUFlowError

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
_STEP: Final = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*|\d{1,9})|\[(\d{1,9})\]")
_STAGE: Final = re.compile(rf"({_NAME})((?:\.(?:[A-Za-z_][A-Za-z0-9_-]*|\d{{1,9}})|\[\d{{1,9}}\])+)")
_ENV: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_OPEN: Final = re.compile(r"(?<!\$)(\$+)\{([^{}\n]{0,300}\})?")
_ANY_OPEN: Final = re.compile(r"(?<!\$)\$+\{")
_ENV_OPEN: Final = re.compile(r"(?<!\$)(\$+)\{env:(?:([A-Za-z_][A-Za-z0-9_]*)\})?")


class UnresolvedReference(GPUFlowError):
    """A reference has no value."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One reference. `path` leads into the stage's result (a leading `result` is left out, so may be empty)."""

    kind: Literal["stage", "env"]
    name: str
    path: tuple[str | int, ...] = ()
    text: str = ""

    @property
    def stage(self) -> str:
        """The stage that it refers to."""
        return self.name

    def __str__(self) -> str:
        return self.text


def parse_reference(inside: str) -> Reference:
    """Read what stands between `${` and `}`. Raises ValueError with cause and mend."""
    read = _read_reference(inside)
    if isinstance(read, str):
        raise ValueError(read)
    return read


@lru_cache(maxsize=1024)  # a template may repeat one thousands of times
def _read_reference(inside: str) -> Reference | str:
    """Return a reference, or why it is none."""
    text = "${" + inside + "}"
    inside = inside.strip()
    env = _ENV.fullmatch(inside)
    if env:
        return Reference(kind="env", name=env[1], text=text)
    stage = _STAGE.fullmatch(inside)
    if stage:
        path = tuple(_step(found) for found in _STEP.finditer(stage[2]))
        return Reference(kind="stage", name=stage[1], path=path[path[:1] == ("result",) :], text=text)
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", inside):
        mend = f"for an environment variable write ${{env:{inside}}}"
    elif re.fullmatch(_NAME, inside):
        mend = f"for the whole result of stage {inside!r} write ${{{inside}.result}}"
    else:
        mend = "write ${stage.result.field} or ${env:NAME}"
    return f"{text!r} is not a reference; {mend}, or $${{...}} for the text itself"


def _step(found: re.Match[str]) -> str | int:
    word, index = found.groups()
    if index is not None:
        return int(index)
    return int(word) if word.isdigit() else str(word)


def references_in(text: str) -> Iterator[Reference | ValueError]:
    """Yield every live reference of one text; a malformed one as the ValueError that says why."""
    for found in _OPEN.finditer(text):
        if len(found[1]) != 1:
            continue
        if found[2] is None:
            yield ValueError("'${' is not closed; write ${stage.result.field}, or $${ for the text itself")
            continue
        read = _read_reference(found[2][:-1])
        yield ValueError(read) if isinstance(read, str) else read


def find_references(value: Any) -> list[Reference]:
    """Return every well-formed reference in a value, keys of mappings left out, in order of appearance."""
    return [ref for _, ref in walk_references(value) if isinstance(ref, Reference)]


def walk_references(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Reference | ValueError]]:
    """Yield (path, reference or ValueError) for every text in a value."""
    if isinstance(value, str):
        if "${" in value:
            for ref in references_in(value):
                yield path, ref
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk_references(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk_references(item, (*path, index))


def is_pending(value: Any, *, at_dispatch: bool = False) -> bool:
    """Say whether a value is text that is still to be replaced: by a result (before dispatch), or in the child."""
    if not isinstance(value, str) or "${" not in value:
        return False
    if not at_dispatch:
        return any(True for _ in references_in(value))
    return any(len(found[1]) == 1 and found[2] for found in _ENV_OPEN.finditer(value))


def resolve(value: Any, lookup: Callable[[Reference], Any]) -> Any:
    """Return `value` with every reference to a stage replaced by what `lookup` gives for it, and escapes undone.

    A text that is one whole reference becomes the value itself, whatever its type; inside a longer text a value is
    written as text, mappings, lists, booleans and null as JSON. `${env:NAME}` and its escapes stay for `resolve_env`.
    Raises what `lookup` raises (`pick` raises UnresolvedReference), and UnresolvedReference for a malformed reference.
    """
    if isinstance(value, str):
        return _resolve_text(value, lookup)
    if isinstance(value, Mapping):
        return {key: resolve(item, lookup) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item, lookup) for item in value]
    return value


def _resolve_text(text: str, lookup: Callable[[Reference], Any]) -> Any:
    if "${" not in text:
        return text
    whole = _OPEN.fullmatch(text)
    if whole and len(whole[1]) == 1 and whole[2] and not whole[2].startswith("env:"):
        return shield(lookup(_parsed(whole[2][:-1])))

    # Data (what was put in, and plain text of the template) is shielded as a whole, so that two values side by side
    # cannot join into a reference either; live `${env:...}` of the template itself pass through.
    done, data, position = "", "", 0
    for found in _OPEN.finditer(text):
        dollars, inside = found.groups()
        is_env = (inside or text[found.end() : found.end() + 4]).startswith("env:")
        data += text[position : found.start()]
        position = found.end()
        if len(dollars) > 1:
            data += found[0][1:]
        elif is_env:
            done, data = done + shield(data) + found[0], ""
        elif inside is None:
            raise UnresolvedReference("'${' is not closed; write ${stage.result.field}, or $${ for the text itself")
        else:
            data += _as_text(lookup(_parsed(inside[:-1])))
    return done + str(shield(data + text[position:]))


def _parsed(inside: str) -> Reference:
    try:
        return parse_reference(inside)
    except ValueError as error:
        raise UnresolvedReference(str(error)) from error


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def shield(value: Any) -> Any:
    """Return data with the texts in it that `resolve_env` would read escaped; every other value as it is."""
    if isinstance(value, str):
        return _ENV_OPEN.sub(lambda found: f"${found[0]}", value) if "${env:" in value else value
    if isinstance(value, Mapping):
        return {key: shield(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shield(item) for item in value]
    return value


def escape(value: Any) -> Any:
    """Return data as template text that `resolve` (and then `resolve_env`) turns back into exactly that data."""
    if isinstance(value, str):
        return _ANY_OPEN.sub(lambda found: f"${found[0]}", value)
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    return value


def escape_malformed(value: Any) -> Any:
    """Return data with `${...}` that is no reference escaped, so that it stays the text that it is."""
    if isinstance(value, str):
        return _OPEN.sub(_escaped_if_malformed, value)
    if isinstance(value, Mapping):
        return {key: escape_malformed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_malformed(item) for item in value]
    return value


def _escaped_if_malformed(found: re.Match[str]) -> str:
    if len(found[1]) == 1 and isinstance(_read_reference((found[2] or " }")[:-1]), str):
        return f"${found[0]}"
    return found[0]


def resolve_env(value: Any, environ: Mapping[str, str]) -> Any:
    """Return `value` with `${env:NAME}` replaced from `environ` and its escapes undone; the last step, in the child.

    Raises UnresolvedReference naming the variable that is not set.
    """
    if isinstance(value, str):
        return _ENV_OPEN.sub(lambda found: _env_text(found, environ), value) if "${env:" in value else value
    if isinstance(value, Mapping):
        return {key: resolve_env(item, environ) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_env(item, environ) for item in value]
    return value


def _env_text(found: re.Match[str], environ: Mapping[str, str]) -> str:
    dollars, name = found.groups()
    if len(dollars) > 1:
        return found[0][1:]
    if name is None:
        return found[0]
    if name not in environ:
        raise UnresolvedReference(
            f"${{env:{name}}}: {name} is not set for this task; add it to spec.env or spec.secrets"
        )
    return environ[name]


def pick(result: Any, reference: Reference) -> Any:
    """Return what `reference` names inside a stage's result.

    Raises UnresolvedReference naming the step that failed, and what was there instead.
    """
    value, walked = result, f"{reference.name}.result"
    for step in reference.path:
        if isinstance(value, Mapping):
            if str(step) not in value:
                there = ", ".join(str(key) for key in list(value)[:12]) or "nothing"
                raise UnresolvedReference(f"{reference}: {walked} has no {str(step)!r}; it has {there}")
            value = value[str(step)]
        elif isinstance(value, list | tuple) and isinstance(step, int):
            if step >= len(value):
                raise UnresolvedReference(
                    f"{reference}: {walked} has {len(value)} entries, so there is no [{step}] (they count from 0)"
                )
            value = value[step]
        elif isinstance(value, list | tuple):
            value = _of_each(value, str(step), f"{reference}: {walked}")
        else:
            raise UnresolvedReference(f"{reference}: {walked} is {_kind(value)}, so it has no {str(step)!r}")
        walked += f"[{step}]" if isinstance(step, int) else f".{step}"
    return value


def _of_each(rows: Sequence[Any], name: str, walked: str) -> list[Any]:
    """Return a field of every entry of a list: `items.output` is the outputs of all items."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UnresolvedReference(f"{walked} is a list whose entries have no fields; name an entry as in [0]")
        if name not in row:
            there = ", ".join(str(key) for key in list(row)[:12]) or "nothing"
            raise UnresolvedReference(f"{walked}[{index}] has no {name!r}; it has {there}")
    return [row[name] for row in rows]


def _kind(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
