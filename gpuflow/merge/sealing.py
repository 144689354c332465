"""Seals the folder of a run of merged calls: each call has a folder, a result and a manifest of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuflow.artifacts.manifest import SealedResults, seal_results
from gpuflow.merge.ends import CHILDREN, MANIFESTS, child_error
from gpuflow.merge.folders import CHILDREN_FOLDER


def named_by_engine(result: Mapping[str, Any], engine: str, *, merged: bool) -> dict[str, Any]:
    """Return a result, or with `merged` the results of several calls, with the engine that made it; "" for none."""
    if not engine:
        return dict(result)
    if not merged:
        return {"engine": engine, **result}
    children = {
        digest: child if child_error(child) is not None else {"engine": engine, **child}
        for digest, child in result[CHILDREN].items()
    }
    return {**result, CHILDREN: children}


def seal_calls(
    folder: Path,
    result: Mapping[str, Any],
    declared: Iterable[str],
    calls: Mapping[str, Mapping[str, Any]],
    url_of: Callable[[str], str],
) -> SealedResults:
    """Complete the results of a run and describe them, as `seal_results` does those of one task.

    The value that is returned has the results of all calls by their digest, an error for one that failed. Raises
    ArtifactError, OSError.
    """
    if len(calls) == 1:
        (digest, spec), *_ = calls.items()
        sealed = seal_results(folder, result, declared, spec, url_of)
        return replace(sealed, result={CHILDREN: {digest: sealed.result}})
    children, manifests = {}, {}
    for digest, child in (result.get(CHILDREN) or {}).items():
        children[digest] = child
        place = folder / CHILDREN_FOLDER / digest
        if digest in calls and child_error(child) is None and place.is_dir():

            def url_inside(name: str, digest: str = digest) -> str:
                return url_of(f"{CHILDREN_FOLDER}/{digest}/{name}")

            own = seal_results(place, child, (), calls[digest], url_inside)
            children[digest], manifests[digest] = own.result, own.digest
    sealed = seal_results(folder, {}, declared, {}, url_of)
    return replace(sealed, result={CHILDREN: children, MANIFESTS: manifests})
