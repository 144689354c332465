"""`output`: where results go, read into what the worker and the notices lane do.

Used by `normalise` and `checking`, and by the command line for a cluster of its own.

A callback is a notice that carries the result: `output.destination: {type: callback}` becomes an entry of `notify`,
which is delivered as every notice is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpuflow.spec.report import Findings, Renames

if TYPE_CHECKING:
    from gpuflow.spec.template import Template

#: Longest that a receiver of a notice may take, in seconds: few slots serve all of a worker's notices.
MOST_SECONDS: Final = 60
#: Fields of a destination that a notice has too.
_OF_NOTICES: Final = ("url", "method", "headers", "timeoutSec", "retries", "secret")
#: Those that the protocol of a results service has no use for.
_OF_CALLBACKS: Final = ("method", "timeoutSec", "retries", "secret")


def call_back(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """Turn a destination of type callback into the notice that it is; the destination keeps the address alone."""
    destination = _destination(spec)
    if destination is None or destination.get("type") != "callback" or not isinstance(destination.get("url"), str):
        return
    notices = spec.setdefault("notify", [])
    if not isinstance(notices, list):
        return
    known = [one.get("url") for one in notices if isinstance(one, Mapping) and one.get("body") == "result"]
    if destination["url"] not in known:
        entry = {name: destination[name] for name in _OF_NOTICES if destination.get(name) is not None}
        seconds = entry.get("timeoutSec")
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > MOST_SECONDS:
            entry["timeoutSec"] = MOST_SECONDS
            findings.warn(
                ("output", "destination", "timeoutSec"), f"is {seconds:g}; a callback is given {MOST_SECONDS} s at most"
            )
        notices.append({"on": ["succeeded"], "body": "result", **entry})
        at = ("notify", len(notices) - 1)
        renamed[at] = ("output", "destination")
        renamed |= {(*at, name): ("output", "destination", name) for name in entry}
    for name in set(destination) - {"type", "url", "path"}:
        del destination[name]


def check_destination(spec: Mapping[str, Any], findings: Findings) -> None:
    """Note what a destination lacks or cannot honour, and say where results go that it does not name a place for."""
    destination = _destination(spec)
    if destination is None:
        return
    kind, at = destination.get("type"), ("output", "destination")
    unused = [name for name in _OF_CALLBACKS if destination.get(name) is not None]
    if kind == "callback":
        if not destination.get("url"):
            findings.add((*at, "url"), "is missing: a callback is a request to this URL")
        if destination.get("path") is not None:
            findings.add((*at, "path"), "is not of a callback; give its URL alone")
        return
    for name in unused:
        note = findings.add if name in ("retries", "secret") else findings.warn
        note((*at, name), f"is of `type: callback`; type {kind} does not use it")
    if kind == "http" and not destination.get("url"):
        findings.warn(
            at,
            "names no url: results go to the store of the fleet (GPUFLOW_STORE_URL, or GPUFLOW_GATEWAY_URL of the "
            "worker), and a task fails where neither is set; `gpuflow run` keeps them in its results folder",
        )


def keep_results(template: Template) -> tuple[Template, list[str]]:
    """Return the template with the http destinations that name no url taken out, and the stages that had one."""
    stages, names = [], []
    for stage in template.stages:
        destination = _destination(stage.spec)
        if destination is not None and destination.get("type") == "http" and not destination.get("url"):
            output = {name: value for name, value in stage.spec["output"].items() if name != "destination"}
            stages.append(replace(stage, spec={**stage.spec, "output": output}))
            names.append(stage.name)
        else:
            stages.append(stage)
    at = "output.destination"
    warnings = tuple(one for one in template.warnings if not (names and one.path.endswith(at)))
    return replace(template, stages=tuple(stages), warnings=warnings), names


def _destination(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    output = spec.get("output")
    destination = output.get("destination") if isinstance(output, Mapping) else None
    return destination if isinstance(destination, dict) else None
