"""What a run executes: the spec of its one call, or one spec that carries several calls as `merge_children`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Section of a spec that carries the calls of several callers (executors/merging.py).
MERGED: Final = "merge_children"
#: What each child brings itself; all else is the same in the calls of one run (`merge.keys`).
OF_THE_CHILD: Final = frozenset({"data", "echo", "inference", "parameters"})


def run_spec(calls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spec that executes the different calls of a run: digest -> spec, at least one."""
    specs = list(calls.values())
    if len(specs) == 1:
        return dict(specs[0])
    common = {name: value for name, value in specs[0].items() if name not in OF_THE_CHILD}
    children = [
        {"id": digest, "spec": {name: value for name, value in spec.items() if name in OF_THE_CHILD}}
        for digest, spec in calls.items()
    ]
    return {**common, MERGED: children}
