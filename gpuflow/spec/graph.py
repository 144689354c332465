"""The order of stages: cycles, what is upstream of what, and a stable topological order. Pure.

Used by `stages`. Edges are a mapping: stage -> the stages that it depends on. Nothing recurses.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

Edges = Mapping[str, Iterable[str]]


def upstream(edges: Edges, stage: str) -> set[str]:
    """Return every stage that must end before `stage` begins."""
    seen: set[str] = set()
    waiting = list(edges.get(stage, ()))
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(edges.get(name, ()))
    return seen


def find_cycle(edges: Edges) -> list[str] | None:
    """Return one cycle as the names along it, the first repeated at the end; None when there is none."""
    done: set[str] = set()
    for start in edges:
        if start in done:
            continue
        trail = {start: iter(edges.get(start, ()))}
        while trail:
            last = next(reversed(trail))
            following = next(trail[last], None)
            if following is None:
                del trail[last]
                done.add(last)
            elif following in trail:
                names = list(trail)
                return [*names[names.index(following) :], following]
            elif following not in done:
                trail[following] = iter(edges.get(following, ()))
    return None


def topological(edges: Edges) -> list[str]:
    """Return the stages so that each stands after what it depends on; where free, in the order given. No cycles."""
    names = list(edges)
    place = {name: index for index, name in enumerate(names)}
    missing = {name: set(edges[name]) for name in names}
    after: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for below in missing[name]:
            after[below].append(name)
    ready = [place[name] for name in names if not missing[name]]
    order: list[str] = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for following in after[name]:
            missing[following].discard(name)
            if not missing[following]:
                heapq.heappush(ready, place[following])
    return order
