"""Which calls are the same, and which can share a run. Pure.

The key of a call is the SHA-256 of its canonical JSON: everything that can change the output, with defaults filled in,
so that field order, defaults that are written out and the spelling of numbers do not matter. The key of a batch is that
of what all calls of one run have to share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.merge.specs import OF_THE_CHILD
from gpuflow.protocol import is_user_type
from gpuflow.spec.sections import MERGEABLE, MERGED_ON_DEMAND

#: Those of which different calls share no run.
_NOT_BATCHED: Final = frozenset({"rag"})
#: What each caller keeps for itself: it changes nothing of the output.
_OF_THE_CALLER: Final = frozenset({"merge", "notify", "priority", "resources", "resultTtlSeconds", "sloSeconds"})
#: Sections that keep a call from sharing a run with others: a limit or files that are its own.
_ALONE: Final = frozenset({"output", "postprocess", "timeout"})
#: Sampling that is the same whether it is written or not (executors/generation/parameters.py; a test compares them).
SAMPLING_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_tokens": 256,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "n": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": True,
    "no_repeat_ngram_size": 0,
    "stream": False,
}
#: Data whose content stands in the call itself.
_INLINE: Final = frozenset({"list", "prompts", "preferences", "graph_template"})
#: Sections whose values become text, in which 1.0 is not 1.
_TEXTUAL: Final = frozenset({"data", "echo", "env", "parameters", "query"})
#: Characters of a prompt that make one token, roughly: what a batch may hold is an estimate.
_CHARACTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, kw_only=True)
class MergeKey:
    """Where a call belongs. `batch` is "" for one that shares no run; `tokens` estimates its prompts and answers.

    `spec` is what the run executes: the call without what its caller keeps for itself.
    """

    call: str
    batch: str
    tokens: int
    spec: Mapping[str, Any]


def merge_key(
    spec: Mapping[str, Any], *, owner: str | None, asks: Sequence[Any], version: str, enabled: bool = True
) -> MergeKey | None:
    """Return the key of a canonical spec, or None for a call that is not to be merged.

    `owner` is None where calls of all owners merge: then different calls share no run, as each would see what the
    others tell. `asks` is what it asks for: queue and requirement of each alternative; `version` is that of the
    executors.
    """
    wish = spec.get("merge") or "auto"
    if not enabled or not _may_merge(spec, wish):
        return None
    call = {name: value for name, value in spec.items() if name not in _OF_THE_CALLER}
    scope = {"owner": owner, "asks": list(asks), "version": version}
    data = call.get("data")
    is_alone = owner is None or call["taskType"] in _NOT_BATCHED or bool(_ALONE & call.keys())
    is_alone = is_alone or not _is_inline(data) or _is_shard(data)
    shared = {name: value for name, value in call.items() if name not in OF_THE_CHILD}
    return MergeKey(
        call=_digest({**scope, "call": _normalised(call)}),
        batch=_digest({**scope, "shared": _normalised(shared)}) if not is_alone else "",
        tokens=_tokens(call),
        spec=call,
    )


def plain_key(task: str, key: str, *, queue: str, version: str) -> MergeKey:
    """Return the key of a call of a team's own Celery task, by what its key function says of the arguments."""
    digest = _digest({"task": task, "key": key, "queue": queue, "version": version})
    return MergeKey(call=digest, batch="", tokens=0, spec={})


def _may_merge(spec: Mapping[str, Any], wish: str) -> bool:
    task_type = str(spec["taskType"])
    if wish == "always":
        return task_type in MERGEABLE | MERGED_ON_DEMAND or is_user_type(task_type)
    return wish == "auto" and task_type in MERGEABLE and _is_deterministic(spec) and _reads_fixed(spec)


def _is_deterministic(spec: Mapping[str, Any]) -> bool:
    """Whether two executions give the same answer: greedy, seeded, or no sampling at all."""
    if spec["taskType"] == "embedding":
        return True
    inference = spec.get("inference")
    if not isinstance(inference, Mapping):  # text that the child replaces
        return False
    return inference.get("temperature") == 0 or inference.get("seed") is not None


def _reads_fixed(spec: Mapping[str, Any]) -> bool:
    """Whether what the call reads beside its model cannot change under its name."""
    search = spec.get("search") or {}
    if not isinstance(search, Mapping):
        return False
    if spec.get("qdrant") or search.get("index"):
        return False
    return _is_fixed(spec.get("data")) and _is_fixed(search.get("documents"))


def _is_inline(data: Any) -> bool:
    return not isinstance(data, Mapping) or data.get("type") in _INLINE


def _is_shard(data: Any) -> bool:
    return isinstance(data, Mapping) and "shard" in data


def _is_fixed(data: Any) -> bool:
    """Whether the content of data cannot change under its name."""
    return _is_inline(data) or bool(data.get("sha256"))


def _normalised(call: Mapping[str, Any]) -> Any:
    plain = {name: value for name, value in call.items() if value not in (None, {}, [])}
    inference = plain.get("inference") or {}
    if isinstance(inference, Mapping) and ("inference" in plain or plain.get("taskType") in ("inference", "rag")):
        plain["inference"] = _sampling(inference)
    model = plain.get("model")
    if isinstance(model, Mapping):
        plain["model"] = _model(model)
    parallel = plain.get("parallel")
    if isinstance(parallel, Mapping) and not parallel.get("enabled", True):
        plain.pop("parallel")
    return {name: value if name in _TEXTUAL else _numbers(value) for name, value in plain.items()}


def _sampling(inference: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in inference.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if given.get("top_k") == -1:  # all of them, as 0 is
        given["top_k"] = 0
    return {**SAMPLING_DEFAULTS, **given}


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in model.items() if value not in (None, {}, [])}
    source = plain.get("source")
    if isinstance(source, Mapping) and source.get("type") == "huggingface":
        plain["source"] = {"revision": "main", **{name: value for name, value in source.items() if value is not None}}
    return plain


def _numbers(value: Any) -> Any:
    """Return a value in which 1.0 is 1: they are the same number, and true is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return value


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _tokens(call: Mapping[str, Any]) -> int:
    data = _mapping(call.get("data"))
    rows: list[Any] = next(
        (data[one] for one in ("items", "prompts", "messages") if isinstance(data.get(one), list)), []
    )
    inference = _mapping(call.get("inference"))
    answers = max(1, len(rows)) * _amount(inference, "max_tokens") * _amount(inference, "n")
    return len(json.dumps(rows)) // _CHARACTERS_PER_TOKEN + (answers if call["taskType"] == "inference" else 0)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _amount(inference: Mapping[str, Any], name: str) -> int:
    """Return a number of the sampling; the default for what is none, such as text that the child replaces."""
    given = inference.get(name)
    return int(given if isinstance(given, int | float) else SAMPLING_DEFAULTS[name])


__all__ = ["SAMPLING_DEFAULTS", "MergeKey", "merge_key", "plain_key"]
