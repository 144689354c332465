"""Which executors of users are registered in this environment: by entry point, or by GPUFLOW_EXECUTORS.

Called by workers, by the child that runs one (`executors.registry`) and by `gpuflow executor`. It reads names alone
and imports none of them; the standard library is all it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpuflow.protocol import is_user_type

#: Group of entry points: name = task type, value = `module:Class`.
GROUP: Final = "gpuflow.executors"
#: The setting, as the child gets it: `owner.name=module:Class`, `owner.name=/a/file.py:Class`, by commas.
VARIABLE: Final = "GPUFLOW_EXECUTORS"

_FORM: Final = "owner.name=module:Class or owner.name=/path/file.py:Class"


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One executor of a user: its task type, its place `module:Class` or `file.py:Class`, and who named it.

    `problem` says why it cannot be used, with the mend; empty for one that can, as far as its name tells.
    """

    task_type: str
    place: str
    source: Literal["entry point", "GPUFLOW_EXECUTORS"]
    package: str = ""
    problem: str = ""


def named(entries: Sequence[str]) -> Iterator[Registration]:
    """Yield what the entries of GPUFLOW_EXECUTORS name."""
    seen: set[str] = set()
    for entry in entries:
        task_type, separator, place = (part.strip() for part in entry.partition("="))
        module, colon, name = place.rpartition(":")
        problem = ""
        if not (task_type and separator and module and colon and name.isidentifier()):
            problem = f"{VARIABLE} has {entry!r}; give {_FORM}"
        elif task_type in seen:
            problem = f"{VARIABLE} names {task_type} twice; keep one"
        else:
            problem = _wrong_name(task_type)
        seen.add(task_type)
        yield Registration(task_type=task_type, place=place, source="GPUFLOW_EXECUTORS", problem=problem)


def installed() -> Iterator[Registration]:
    """Yield what the packages of this environment register."""
    from importlib.metadata import entry_points

    first: dict[str, Registration] = {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else ""
        problem = _wrong_name(point.name)
        other = first.get(point.name)
        if other is not None and (other.place, other.package) == (point.value, package):
            continue  # one package that is found twice on sys.path
        if other is not None:
            problem = (
                f"{point.name} is registered by {other.package} and by {package}; uninstall one, or say which by "
                f"{VARIABLE}={point.name}={point.value}"
            )
        found = Registration(
            task_type=point.name, place=point.value, source="entry point", package=package, problem=problem
        )
        first.setdefault(point.name, found)
        yield found


def registered(entries: Sequence[str]) -> list[Registration]:
    """Return all registrations, by task type; those of GPUFLOW_EXECUTORS (its `entries`) go before entry points."""
    by_path = list(named(entries))
    chosen = {one.task_type for one in by_path if not one.problem}
    return [*by_path, *(one for one in installed() if one.task_type not in chosen)]


def usable(entries: Sequence[str]) -> dict[str, Registration]:
    """Return the registrations that can be used, by task type; a type that two packages claim is none of them."""
    found = registered(entries)
    claimed_twice = {one.task_type for one in found if one.problem}
    return {
        one.task_type: one
        for one in found
        if not one.problem and (one.source == "GPUFLOW_EXECUTORS" or one.task_type not in claimed_twice)
    }


def entries_of(text: str) -> tuple[str, ...]:
    """Split the value of GPUFLOW_EXECUTORS."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _wrong_name(task_type: str) -> str:
    if is_user_type(task_type):
        return ""
    return (
        f"{task_type!r} is no name for a user's executor; name it owner.name, such as acme.translate "
        "(names without a dot are gpuflow's own)"
    )
