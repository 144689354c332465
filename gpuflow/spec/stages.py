"""From the entries of `stages:` or `graph.nodes` to checked stages in order. Used by `parsing` alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from gpuflow.spec.checking import check_spec
from gpuflow.spec.conditions import check_condition
from gpuflow.spec.graph import find_cycle, topological, upstream
from gpuflow.spec.models_task import TaskSpec
from gpuflow.spec.models_types import Strict
from gpuflow.spec.overlay import stage_spec, written_at
from gpuflow.spec.pydantic_report import report
from gpuflow.spec.references import Reference, escape_malformed, parse_reference, walk_references
from gpuflow.spec.report import Findings, Path, one_of, show, suggest
from gpuflow.spec.sections import LEFT_OUT, USED_BY
from gpuflow.spec.stage_matrix import check_matrix
from gpuflow.spec.template import Stage

#: Most stages of one pipeline.
MAX_STAGES: Final = 1000
#: Sections whose texts programs read that have such braces of their own.
_READ_BY_OTHERS: Final = frozenset({"command", "container", "env"})
_PLACEHOLDER: Final = re.compile(r"\{\{\s{0,9}([A-Za-z0-9][\w-]{0,62})((?:\.[\w-]{1,99}|\[\d{1,9}\]){1,20})\s{0,9}\}\}")
_NAMED: Final = re.compile(r"(?<!\$)\$\{(\s{0,9}([A-Za-z0-9][\w-]{0,62})[^{}\n]{0,300})\}")
STAGE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.I)


def _stage_name(value: str) -> str:
    if not STAGE_NAME.fullmatch(value):
        raise ValueError(
            f"{show(value)} is no name of a stage; use letters, digits, - and _, at most 63, a letter or digit first"
        )
    return value


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Entry(Strict):
    """One entry of `stages:` or `graph.nodes`."""

    name: Annotated[str, AfterValidator(_stage_name)]
    dependsOn: Annotated[list[str], BeforeValidator(_names)] | None = None  # noqa: N815
    spec: dict[str, Any] = Field(default_factory=dict)
    matrix: dict[str, Any] | None = None
    condition: Any = None


@dataclass(kw_only=True)
class Draft:
    """A stage while it is checked: its entry, where it stands, what it depends on."""

    name: str
    at: Path
    entry: Entry
    spec: dict[str, Any] = field(default_factory=dict)
    matrix: dict[str, list[Any]] | None = None
    condition: dict[str, Any] | None = None
    hard: list[str] = field(default_factory=list)
    references: list[tuple[Path, Reference]] = field(default_factory=list)


def build_stages(
    entries: list[Any],
    at: Path,
    base: dict[str, Any],
    base_at: Path,
    findings: Findings,
    *,
    linear: bool,
    foreign: bool,
) -> tuple[Stage, ...]:
    """Return the stages in topological order; empty when there is a mistake, which is noted in `findings`.

    `linear` (`stages:`) makes each stage depend on the one before it.
    """
    if not entries or len(entries) > MAX_STAGES:
        findings.add(at, f"has {len(entries)} stages; give 1 to {MAX_STAGES}")
        return ()
    drafts = _drafts(entries, at, findings, foreign=foreign)
    for draft in drafts.values():
        _fill(draft, base, base_at, findings, drafts, foreign=foreign)
    _warn_of_unused(base, base_at, drafts, findings)
    names = list(drafts)
    for index, draft in enumerate(drafts.values()):
        draft.hard = _explicit(draft, drafts, findings)
        if linear and index and names[index - 1] not in draft.hard:
            draft.hard.insert(0, names[index - 1])
    edges = _edges(drafts, findings)
    _check_target(drafts, findings)
    if findings.mistakes:
        return ()
    return tuple(
        Stage(
            name=name,
            depends_on=tuple(edges[name]),
            spec=drafts[name].spec,
            matrix=drafts[name].matrix,
            condition=drafts[name].condition,
        )
        for name in topological(edges)
    )


def _drafts(entries: list[Any], at: Path, findings: Findings, *, foreign: bool) -> dict[str, Draft]:
    drafts: dict[str, Draft] = {}
    for index, raw in enumerate(entries):
        here = (*at, index)
        if not isinstance(raw, dict):
            findings.add(here, f"is {show(raw)}; a stage is a mapping with name and spec")
            continue
        entry = _entry(_moved(raw) if foreign else raw, findings.within(_under(findings, here)), foreign=foreign)
        if entry is None:
            continue
        if entry.name in drafts:
            findings.add(
                (*here, "name"),
                f"{entry.name!r} is the name of another stage too ({_place(drafts[entry.name])}); rename one",
            )
            continue
        drafts[entry.name] = Draft(name=entry.name, at=here, entry=entry)
    return drafts


def _place(draft: Draft) -> str:
    return f"entry {draft.at[-1]}"


def _under(findings: Findings, at: Path) -> Any:
    return lambda path: findings.locate((*at, *path))


def _moved(raw: dict[str, Any]) -> dict[str, Any]:
    """MLOC also writes a stage's fields beside its name, `dependencies`, and `dependsOn` or `condition` in its spec."""
    entry = dict(raw)
    if "dependencies" in entry:
        entry.setdefault("dependsOn", entry.pop("dependencies"))
    spec = dict(entry["spec"]) if isinstance(entry.get("spec"), dict) else {}
    if "dependsOn" in spec:
        entry.setdefault("dependsOn", spec["dependsOn"])
        del spec["dependsOn"]
    if "condition" in spec:
        entry.setdefault("condition", spec.pop("condition"))
    for key in [key for key in entry if key in TaskSpec.model_fields and key != "spec"]:
        spec.setdefault(key, entry.pop(key))
    return {**entry, "spec": spec} if "spec" not in entry or isinstance(entry["spec"], dict) else entry


def _entry(raw: dict[str, Any], findings: Findings, *, foreign: bool) -> Entry | None:
    try:
        return Entry.model_validate(raw)
    except ValidationError as error:
        wrong, unknown = report(error, Entry, findings, lambda value: False, lenient=foreign)
        for key in [key for key in raw if key in TaskSpec.model_fields and key not in Entry.model_fields]:
            findings.add((key,), "belongs into the spec of the stage; move it under spec:")
        if wrong:
            return None
        return Entry.model_validate({key: value for key, value in raw.items() if (key,) not in unknown})


def _fill(
    draft: Draft,
    base: dict[str, Any],
    base_at: Path,
    findings: Findings,
    stages: Collection[str],
    *,
    foreign: bool,
) -> None:
    own, own_at = draft.entry.spec, (*draft.at, "spec")
    merged = stage_spec(base, own)

    def locate(path: Path) -> Path:
        return findings.locate(written_at(path, own, own_at, base, base_at))

    inside = findings.within(locate)
    if draft.entry.matrix is not None:
        draft.spec, draft.matrix = check_matrix(
            merged,
            draft.entry.matrix,
            inside,
            findings.within(_under(findings, (*draft.at, "matrix"))),
            foreign=foreign,
        )
    else:
        draft.spec = check_spec(merged, inside, foreign=foreign)
    note_placeholders(draft.spec, inside, stages, foreign=foreign)
    draft.spec, draft.references = collect_references(draft.spec, inside, foreign=foreign)
    if draft.matrix:
        under = findings.within(_under(findings, (*draft.at, "matrix")))
        draft.matrix, more = collect_references(draft.matrix, under, foreign=foreign)
        draft.references += more
    if draft.entry.condition is not None:
        under = findings.within(_under(findings, (*draft.at, "condition")))
        draft.condition = check_condition(draft.entry.condition, under, foreign=foreign)
        _, more = collect_references(draft.condition, under, foreign=False)
        draft.references += more


def note_placeholders(spec: Any, findings: Findings, stages: Collection[str], *, foreign: bool) -> None:
    """Note what names a stage and is no reference: it would go to the model as text.

    `{{stage.field}}` is a mistake in a foreign template; in one of ours a warning, since another reader of the text may
    mean it so. A malformed `${stage...}`, which is a mistake of ours anyway, is one of theirs too.
    """
    for path, key in _keys(spec):
        if any(found[2] in stages for found in _NAMED.finditer(key)):
            findings.add(path, f"has the key {show(key)}, and keys are not replaced; write the reference as a value")
    for path, text in _texts(spec):
        if path[0] in _READ_BY_OTHERS or "chat_template" in path:
            continue
        for found in _PLACEHOLDER.finditer(text) if "{{" in text else ():
            if found[1] in stages:
                note = findings.add if foreign else findings.warn
                note(path, f"has {found[0]!r}, which stays text; write ${{{found[1]}{found[2]}}}")
        for found in _NAMED.finditer(text) if foreign and "${" in text else ():
            if found[2] in stages:
                try:
                    parse_reference(found[1])
                except ValueError as error:
                    findings.add(path, str(error))


def _keys(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the keys that look as if they held a reference, with the path of their mapping."""
    if isinstance(value, Mapping):
        yield from ((path, key) for key in value if isinstance(key, str) and "${" in key)
        for key, item in value.items():
            yield from _keys(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _keys(item, (*path, index))


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def collect_references(value: Any, findings: Findings, *, foreign: bool) -> tuple[Any, list[tuple[Path, Reference]]]:
    """Return the value and its references to stages, once for each path as located; malformed ones are mistakes, or, in
    foreign templates, plain text with a warning."""
    found: dict[tuple[Path, Reference], None] = {}
    malformed: set[tuple[Path, str]] = set()
    for path, reference in walk_references(value):
        if findings.full:
            break
        if isinstance(reference, ValueError):
            wrong = (path, str(reference))
            if wrong in malformed:
                continue
            malformed.add(wrong)
            if foreign:
                findings.warn(path, f"is taken as plain text: {reference}")
            else:
                findings.add(path, str(reference))
        elif reference.kind == "stage":
            found[findings.locate(path), reference] = None
    return (escape_malformed(value) if malformed and foreign else value), list(found)


def _warn_of_unused(base: dict[str, Any], base_at: Path, drafts: Mapping[str, Draft], findings: Findings) -> None:
    for section in LEFT_OUT:
        if section in base and drafts and not any(section in draft.spec for draft in drafts.values()):
            types = USED_BY[section]
            used_by = one_of(sorted(types)) if types else "a user's own type (owner.name)"
            why = f"no stage is of {used_by}"
            findings.warn((*base_at, section), f"is not used: {why}")


def _explicit(draft: Draft, drafts: Mapping[str, Draft], findings: Findings) -> list[str]:
    names: list[str] = []
    for index, name in enumerate(draft.entry.dependsOn or ()):
        here = (*draft.at, "dependsOn", index)
        if name == draft.name:
            findings.add(here, f"makes {name!r} depend on itself; remove it")
        elif name not in drafts:
            findings.add(here, f"names {show(name)}, which is no stage{suggest(name, drafts) or _stages(drafts)}")
        elif name not in names:
            names.append(name)
    return names


def _stages(drafts: Mapping[str, Draft]) -> str:
    return f"; the stages are {', '.join(list(drafts)[:20])}"


def _check_target(drafts: Mapping[str, Draft], findings: Findings) -> None:
    """Note the first stage that is to run in another place than those before it."""
    first: tuple[str, str] | None = None
    for name, draft in drafts.items():
        target = str(draft.spec.get("target") or "worker")
        if first is None:
            first = (name, target)
        elif target != first[1]:
            findings.add(
                (*draft.at, "spec", "target"),
                f"is {target}, and that of {first[0]!r} is {first[1]}; a pipeline runs in one place: give all the same",
            )
            return


def _edges(drafts: Mapping[str, Draft], findings: Findings) -> dict[str, list[str]]:
    """Return stage -> what it depends on, references included; every fault on the way is noted."""
    edges = {name: list(draft.hard) for name, draft in drafts.items()}
    cycle = find_cycle(edges)
    if cycle:
        findings.add((*drafts[cycle[0]].at, "dependsOn"), f"closes a cycle: {' -> '.join(cycle)}; remove one of these")
    plain = findings.within(lambda path: path)
    implied: list[tuple[str, Path, Reference]] = []
    for name, draft in drafts.items():
        for path, reference in draft.references:
            target = reference.name
            if target == name:
                plain.add(path, f"{reference} refers to its own stage; refer to one before it")
            elif target not in drafts:
                near = suggest(target, drafts) or _stages(drafts)
                plain.add(path, f"{reference}: there is no stage {target!r}{near}")
            else:
                implied.append((name, path, reference))
    if cycle:
        return edges
    whole = {name: list(below) for name, below in edges.items()}
    for name, _, reference in implied:
        if reference.name not in whole[name]:
            whole[name].append(reference.name)
    if find_cycle(whole):
        _note_backward(edges, implied, plain)
    return whole


def _note_backward(edges: dict[str, list[str]], implied: list[tuple[str, Path, Reference]], findings: Findings) -> None:
    """Find, in the order they were written, the references to stages that run later."""
    for name, path, reference in implied:
        target = reference.name
        if name in upstream(edges, target):
            findings.add(
                path, f"{reference}: stage {target!r} is not upstream of {name!r}, it runs after it; turn them round"
            )
        elif target not in edges[name]:
            edges[name].append(target)
