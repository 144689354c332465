"""What a worker may know of a message before it takes it: hints at the front of its text. Pure.

`x` is what it asks to be run by (`routing.offers`: a worker takes what it offers), `m` the model (a worker that has it
takes it first), `k` the names of the secrets that it asks for (a worker takes what it offers all of), `s` the sessions
that can answer it (`routing.session_names`: a warm one needs no more GPUs), `t` the time limit in seconds (what may run
on GPUs that are reserved for later). broker/lua/pop.lua reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuflow.routing.offers import asked_name, secrets_asked
from gpuflow.routing.session_names import session_name
from gpuflow.spec.units import duration_seconds

_DIGITS: Final = 16
#: The hints of the session and of what is asked for, in the front of a message that broker/lua/common.lua has stamped.
_SESSION: Final = re.compile(r'^\{"at":[\d.]+,[^{}]*?"s": "([0-9a-f]+)"')
_ASKED: Final = re.compile(r'^\{"at":[\d.]+,[^{}]*?"x": "([^"\\]+)"')


def model_key(spec: Mapping[str, Any]) -> str:
    """Return a short name of the model that a spec loads: equal for equal sources; "" for none."""
    source = (spec.get("model") or {}).get("source")
    if not isinstance(source, Mapping) or not source.get("identifier"):
        return ""
    text = json.dumps([source.get("type"), source["identifier"], source.get("revision")])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def hints(spec: Mapping[str, Any], asks: Sequence[str] = ()) -> dict[str, Any]:
    """Return the hints of a canonical spec; `asks` are the queues of all alternatives of what it asks for."""
    found: dict[str, Any] = {"x": asked_name(spec)}
    if key := model_key(spec):
        found["m"] = key
    if secrets := secrets_asked(spec):
        found["k"] = ",".join(secrets)
    if name := session_name(spec, asks):
        found["s"] = name
    if (seconds := limit_seconds(spec)) is not None:
        found["t"] = seconds
    return found


def limit_seconds(spec: Mapping[str, Any]) -> float | None:
    """Return the time limit of a canonical spec in seconds, None without one."""
    return duration_seconds(spec["timeout"]) if spec.get("timeout") else None


def session_of(raw: str) -> tuple[str, str]:
    """Return the name of the sessions that can answer a message, by its text, and what it asks for; "" for none."""
    found, asked = _SESSION.match(raw), _ASKED.match(raw)
    return (found[1] if found else "", asked[1] if asked else "")
