"""Which fields of `data` a type of data has, and which of them a task type reads. Used by `combinations` alone.

A field of another type of data would be dropped in silence: `split` beside `items`, or `items` of a stage over the data
set of its base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.protocol import is_user_type
from gpuflow.spec.artifact_reference import is_reference
from gpuflow.spec.models_data import FILE_TYPES, SOURCES
from gpuflow.spec.references import is_pending
from gpuflow.spec.report import Path, one_of, show, suggest
from gpuflow.spec.row_forms import (
    PREFERENCE_ROLES,
    PROMPT_ROLES,
    SUPERVISED_ROLES,
    USUAL,
    Roles,
    is_recognised,
)
from gpuflow.spec.sections import TRAINING_SCHEMAS

#: Fields that say where rows are.
_SOURCE_FIELDS: Final = frozenset(name for names in SOURCES.values() for name in names) - {"name"}
#: Field -> the types of data that have it. What is not here, all have.
_OF_TYPES: Final[Mapping[str, frozenset[str]]] = {
    **{field: frozenset(kind for kind, names in SOURCES.items() if field in names) for field in _SOURCE_FIELDS},
    "name": frozenset({"dataset", "preset"}),
    "split": frozenset({"dataset"}),
    "revision": frozenset({"dataset"}),
    "column": frozenset(SOURCES) - {"graph_template", "documents"},
    "columns": frozenset(SOURCES) - {"graph_template", "documents"},
    "shuffle": frozenset(SOURCES) - {"documents"},
    "seed": frozenset(SOURCES) - {"documents"},
    "eval_split": frozenset(SOURCES) - {"graph_template", "documents"},
}
_SUPERVISED: Final = frozenset({"sft", "lora_sft"})
#: Field -> the task types that read it; users' own read what they like.
_OF_TASKS: Final[Mapping[str, frozenset[str]]] = {
    "eval_split": frozenset(TRAINING_SCHEMAS),
    "separator": _SUPERVISED,
}
#: What to write in place of a field of _OF_TASKS.
_INSTEAD: Final[Mapping[str, str]] = {
    "eval_split": "it puts rows aside for the evaluation of a training; to take fewer rows write max_items",
    "separator": "it stands between prompt and completion of a training",
}

#: Task type -> the roles of each form of a row.
FORMS: Final[Mapping[str, Roles]] = {
    "sft": SUPERVISED_ROLES, "lora_sft": SUPERVISED_ROLES, "echo": SUPERVISED_ROLES, "dpo": PREFERENCE_ROLES,
    "reward": PREFERENCE_ROLES, "ppo": PROMPT_ROLES, "grpo": PROMPT_ROLES,
}  # fmt: skip
#: Task types whose chats may come with a column of tools (executors/data/columns.py; a test compares them).
TAKE_TOOLS: Final = frozenset({"sft", "lora_sft", "echo", "dpo", "reward"})
#: Task type -> roles of which it reads one.
ONE_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "inference": ("prompt", "messages", "text"),
    "embedding": ("text",),
    "rag": ("prompt", "messages", "text"),
}


_PREFER: Final = ("dpo", "reward")
#: So many rows of a template are looked at.
_MOST_ROWS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is to be told of a field. `is_idle`: it changes nothing, so a warning will do. `contradicts`: nobody can
    mean it, in another project's template neither.
    """

    path: Path
    message: str
    is_idle: bool = False
    contradicts: bool = False


def notes_of_data(data: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    """Yield what is to be told of the fields of a section `data` whose type is known."""
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in SOURCES:
        return
    for field in [name for name, value in data.items() if value is not None]:
        if field in _OF_TYPES and kind not in _OF_TYPES[field]:
            yield Note(path=(field,), message=_other_type(field, kind, data), contradicts=field in _SOURCE_FIELDS)
        elif field in _OF_TASKS and task_type not in _OF_TASKS[field] and not is_user_type(task_type) and data[field]:
            yield Note(path=(field,), message=f"is not used by taskType {task_type}: {_INSTEAD[field]}")
    if data.get("column") is not None and data.get("columns") is not None:
        yield Note(path=("column",), message="and columns both name columns, and columns counts; keep one of them")
    shuffles = data.get("shuffle") or (task_type in TRAINING_SCHEMAS and data.get("eval_split"))
    if data.get("seed") is not None and not shuffles and kind != "documents" and not is_user_type(task_type):
        yield Note(path=("seed",), message="is not used: the rows are not shuffled; add shuffle: true", is_idle=True)
    share = data.get("eval_split")
    names_split = isinstance(share, str) and not is_pending(share) and task_type in TRAINING_SCHEMAS
    if names_split and kind not in ("dataset", "graph_template", "documents"):
        yield Note(
            path=("eval_split",),
            contradicts=True,
            message=f"is {show(share)}, a split, which only data sets of the hub have; give a share such as 0.1"
            + (", or a file as {upload: ./eval.jsonl}" if kind in FILE_TYPES else ""),
        )
    yield from _roles(data.get("columns"), task_type)
    yield from _rows(data, task_type)


def _other_type(field: str, kind: str, data: Mapping[str, Any]) -> str:
    if field in _SOURCE_FIELDS:
        mine = [name for name in SOURCES[kind] if data.get(name) is not None]
        beside = f" beside {one_of(mine)}" if mine else ""
        return (
            f"stands{beside} in data of type {kind}, which does not read it; keep one of them (in a stage, `type` "
            "beside it replaces the data of the base)"
        )
    return f"belongs to data of type {one_of(sorted(_OF_TYPES[field]))}, and this is of type {kind}; leave it out"


def _rows(data: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    """Yield what is wrong with the columns of rows that stand in the template; executors know the same forms."""
    rows = data.get("items")
    if not isinstance(rows, list) or task_type not in USUAL:
        return
    texts = next((index for index, row in enumerate(rows) if isinstance(row, str) and not is_pending(row)), None)
    if task_type in _PREFER and texts is not None:
        message = f"is text; a row of {task_type} is a mapping with prompt, chosen and rejected"
        yield Note(path=("items", texts), message=message, contradicts=True)
    records = [row for row in rows[:_MOST_ROWS] if isinstance(row, Mapping)]
    if not records or is_reference(rows[0]):
        return
    found = list(dict.fromkeys(str(column) for row in records for column in row))
    shown = f"the columns found are {one_of(found)}" if found else "there are no columns"
    columns = data.get("columns")
    named = [*columns.values()] if isinstance(columns, Mapping) else [data["column"]] if data.get("column") else []
    absent = [name for name in named if isinstance(name, str) and name not in found and not is_pending(name)]
    if absent:
        path = ("columns",) if isinstance(columns, Mapping) else ("column",)
        yield Note(path=path, message=f"names {one_of(absent)}, but {shown}", contradicts=True)
    elif not named and not is_recognised(found, task_type):
        forms = ", or ".join(dict.fromkeys(" and ".join(form.values()) for form in USUAL[task_type]))
        message = (
            f"have none of the columns that {task_type} reads ({forms}); {shown}; say which is which by data.columns"
        )
        yield Note(path=("items",), message=message, contradicts=True)


def _roles(columns: Any, task_type: str) -> Iterator[Note]:
    """Yield what is wrong with the roles that columns are given."""
    if not isinstance(columns, Mapping) or not columns:
        return
    given = [str(role) for role in columns]
    if task_type in ONE_ROLE:
        known = ONE_ROLE[task_type]
        used = next((role for role in ("messages", "prompt", "text") if role in given and role in known), None)
        for role in given:
            if role not in known:
                message = f"is no role that taskType {task_type} reads; it reads {one_of(known)}{suggest(role, known)}"
                yield Note(path=("columns", role), message=message, contradicts=True)
            elif role != used:
                yield Note(path=("columns", role), message=f"is not used: {used} names the column; keep one of them")
        return
    if task_type not in FORMS:
        return
    forms = FORMS[task_type]
    tools = {"tools"} if task_type in TAKE_TOOLS else set()
    known = tuple(dict.fromkeys([role for form in forms for role in form] + sorted(tools)))
    wrong = [role for role in given if role not in known]
    for role in wrong:
        message = f"is no role that taskType {task_type} reads; it reads {one_of(known)}{suggest(role, known)}"
        yield Note(path=("columns", role), message=message, contradicts=True)
    if not wrong and not any(set(form) == set(given) - tools for form in forms):
        words = ", or ".join(" and ".join(form) for form in forms)
        yield Note(
            path=("columns",),
            message=f"has the roles {', '.join(given)}; taskType {task_type} takes {words}",
            contradicts=True,
        )
