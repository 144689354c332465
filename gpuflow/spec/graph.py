"""The order of stages: cycles, what is upstream of what, and a stable topological order. Pure.

Used by `stages`. Edges are a mapping: stage -> the stages that it depends on. Nothing recurses.
"""

from __future__ import annotations

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
        trail: list[str] = [start]
        waiting = [iter(edges.get(start, ()))]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                done.add(trail.pop())
            elif following in trail:
                return [*trail[trail.index(following) :], following]
            elif following not in done:
                trail.append(following)
                waiting.append(iter(edges.get(following, ())))
    return None


def topological(edges: Edges) -> list[str]:
    """Return the stages so that each stands after what it depends on; where free, in the order given. No cycles."""
    order: list[str] = []
    placed: set[str] = set()
    left = list(edges)
    while left:
        ready = next(name for name in left if placed.issuperset(edges[name]))
        order.append(ready)
        placed.add(ready)
        left.remove(ready)
    return order
