"""Fields that are right by themselves and have no use beside the others of their task: else dropped in silence.

Used by `checking`, once a spec has its final words. In gpuflow/v1 such a field is a mistake; in a template of another
project, whose programs pass over it too, it is taken out with a warning. What changes nothing is a warning in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow.protocol import is_user_type
from gpuflow.spec.data_fields import Note, notes_of_data
from gpuflow.spec.presets import list_presets, load_preset
from gpuflow.spec.references import is_pending
from gpuflow.spec.report import Findings, Path, one_of, show, suggest
from gpuflow.spec.sections import MERGEABLE, MERGED_ON_DEMAND, PARTS_USED_BY, TRAINING_SCHEMAS

#: Kind of destination -> its fields of those that name a place and a right.
_OF_DESTINATIONS: Final[Mapping[str, frozenset[str]]] = {
    "local": frozenset({"path"}),
    "http": frozenset({"url", "headers"}),
    "s3": frozenset({"url"}),
}
_PLACES: Final = ("url", "path", "headers")
_REPOSITORY: Final = ("revision", "subfolder", "gguf_file")


def check_combinations(spec: dict[str, Any], task_type: str, findings: Findings, *, foreign: bool) -> None:
    """Note the fields that others make useless; those of a foreign template are taken out of `spec`."""
    for note in [*_notes(spec, task_type)]:
        if note.is_idle or (foreign and not note.contradicts):
            is_said = note.message.startswith("is not used")
            findings.warn(note.path, note.message if is_said else f"is not used: it {note.message}")
            if foreign:
                _take_out(spec, note.path)
        else:
            findings.add(note.path, note.message)
    for path, message in _impossible(spec, task_type):
        findings.add(path, message)


def _notes(spec: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    for path in (("data",), ("search", "documents")):
        data = _at(spec, path)
        if isinstance(data, Mapping):
            for note in notes_of_data(data, task_type):
                yield Note(
                    path=(*path, *note.path), message=note.message, is_idle=note.is_idle, contradicts=note.contradicts
                )
    yield from _model(spec, task_type)
    yield from _destination(spec)
    for path in (("checkpoint", "load"), ("search", "index")):
        load = _at(spec, path)
        if isinstance(load, Mapping) and load.get("headers") is not None and load.get("url") is None:
            yield Note(path=(*path, "headers"), message="are sent to a url, and none is given; leave them out")
    yield from _merging(spec, task_type)
    yield from _retrieval(spec, task_type)
    gpu = _at(spec, ("resources", "hardware", "gpu"))
    if isinstance(gpu, Mapping) and gpu.get("count") in (0, "0"):
        for name in ("type", "memory", "compute_capability", "fraction"):
            if gpu.get(name) not in (None, "any"):
                yield Note(
                    path=("resources", "hardware", "gpu", name),
                    message="is not used: the count is 0, so the task gets no GPU",
                    is_idle=True,
                )
    training = spec.get("training")
    is_lora = task_type == "lora_sft" or spec.get("lora") is not None
    if task_type in TRAINING_SCHEMAS and not is_lora and _mapping(training).get("merge_adapter") is True:
        message = "has no adapter to merge; add the section lora, or leave it out"
        yield Note(path=("training", "merge_adapter"), message=message)


def _model(spec: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    model = spec.get("model")
    if not isinstance(model, Mapping):
        return
    for (section, part), types in PARTS_USED_BY.items():
        if section == "model" and model.get(part) and task_type not in types and not is_user_type(task_type):
            yield Note(
                path=("model", part),
                message=f"is not used by taskType {task_type}; it belongs to {one_of(sorted(types))}",
            )
    if model.get("vllm") and spec.get("engine") == "transformers" and task_type in PARTS_USED_BY["model", "vllm"]:
        yield Note(path=("model", "vllm"), message="is not used: engine is transformers", is_idle=True)
    source = model.get("source")
    if not isinstance(source, Mapping):
        return
    for name in _REPOSITORY:
        value = source.get(name)
        if value is None or (name == "revision" and value == "main"):
            continue
        if source.get("type") == "local" and name == "revision":
            yield Note(path=("model", "source", name), message="is of a repository of the hub, and this is a folder")
        elif source.get("type") == "preset" and _has_own_files(source.get("identifier")):
            message = (
                "is of a repository of the hub, and this preset has files of its own; name the model by its hub id"
            )
            yield Note(path=("model", "source", name), message=message)


def _has_own_files(name: Any) -> bool:
    if not isinstance(name, str) or name not in list_presets("models"):
        return False
    source = load_preset("models", name).get("source")
    return isinstance(source, Mapping) and source.get("type") not in ("huggingface", "local")


def _destination(spec: Mapping[str, Any]) -> Iterator[Note]:
    given = _at(spec, ("output", "destination"))
    if not isinstance(given, Mapping) or given.get("type") not in _OF_DESTINATIONS:
        return
    kind = str(given["type"])
    takes_path = kind == "s3" and given.get("url") is None  # another way to write the address
    for name in _PLACES:
        if given.get(name) is not None and name not in _OF_DESTINATIONS[kind] and not (name == "path" and takes_path):
            message = f"is not of a destination of type {kind}, which has {one_of(sorted(_OF_DESTINATIONS[kind]))}"
            yield Note(path=("output", "destination", name), message=message)


def _merging(spec: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    wish = spec.get("merge") or "auto"
    on_demand = task_type in MERGED_ON_DEMAND or is_user_type(task_type)
    if wish == "always" and task_type not in MERGEABLE and not on_demand:
        types = one_of(sorted(MERGEABLE | MERGED_ON_DEMAND))
        yield Note(
            path=("merge",),
            message=f"is 'always', and calls of taskType {task_type} are never merged, those of {types} are",
        )
    keeps = spec.get("resultTtlSeconds")
    if isinstance(keeps, int | float) and keeps > 0:
        may = task_type in MERGEABLE or (on_demand and wish == "always")
        if wish == "never" or not may:
            why = "merge is never" if wish == "never" else f"calls of taskType {task_type} are not merged"
            mend = "; write merge: always" if on_demand and wish != "never" else "; leave it out"
            yield Note(path=("resultTtlSeconds",), message=f"has no calls to answer: {why}{mend}")


def _retrieval(spec: Mapping[str, Any], task_type: str) -> Iterator[Note]:
    if task_type != "rag":
        return
    if spec.get("index") is not None:
        for name in ("model", "inference"):
            if spec.get(name) is not None:
                message = "is not used: `index` makes one that only makes an index, and asks no model"
                yield Note(path=(name,), message=message, is_idle=True)
        return
    has_model = _at(spec, ("model", "source")) is not None or spec.get("checkpoint") is not None
    if _at(spec, ("search", "context_characters")) is not None and not has_model:
        yield Note(
            path=("search", "context_characters"),
            message="is not used: without model.source the passages are the result",
            is_idle=True,
        )


def _impossible(spec: Mapping[str, Any], task_type: str) -> Iterator[tuple[Path, str]]:
    """Yield what no worker could do, whoever wrote it: path, and cause with mend."""
    yield from _presets(spec)
    yield from _address(spec)
    if task_type not in TRAINING_SCHEMAS:
        return
    training = _mapping(spec.get("training"))
    data = _mapping(spec.get("data"))
    is_known = bool(data) and not any(is_pending(value) for value in data.values())
    strategy = training.get("eval_strategy")
    if is_known and strategy not in (None, "no", False) and not is_pending(strategy) and not data.get("eval_split"):
        mend = "TRL's PPO evaluates nothing: leave it out" if task_type == "ppo" else "give data.eval_split, as in 0.1"
        yield ("training", "eval_strategy"), f"is {show(strategy)}, and there are no rows to evaluate on; {mend}"
    if training.get("use_vllm") is True:
        yield (
            ("training", "use_vllm"),
            "is true, and the environment of the trainers has no vLLM, which needs another transformers; leave it out",
        )
    options = {**_mapping(training.get("model_init_kwargs")), **_mapping(_at(spec, ("model", "transformers")))}
    asked = next((name for name in ("quantization_config", "load_in_4bit", "load_in_8bit") if options.get(name)), None)
    if asked is not None and task_type != "lora_sft" and spec.get("lora") is None:
        at: Path = ("model", "transformers", asked)
        if asked not in _mapping(_at(spec, ("model", "transformers"))):
            at = ("training", "model_init_kwargs", asked)
        yield at, "asks for quantised weights, which cannot be trained; add the section lora, or leave it out"


def _presets(spec: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    source = _at(spec, ("model", "source"))
    if isinstance(source, Mapping) and source.get("type") == "preset":
        yield from _unknown_preset("models", source.get("identifier"), ("model", "source", "identifier"))
    for path in (("data",), ("search", "documents")):
        data = _at(spec, path)
        if isinstance(data, Mapping) and data.get("type") == "preset":
            yield from _unknown_preset("datasets", data.get("name"), (*path, "name"))


def _unknown_preset(kind: str, name: Any, path: Path) -> Iterator[tuple[Path, str]]:
    known = list_presets(kind)
    if isinstance(name, str) and name not in known and not is_pending(name):
        near = suggest(name, known)
        yield path, f"is {show(name)}, which is no preset{near or f'; there are {one_of(known)}'}"


def _address(spec: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield what is wrong with the address of a destination; one with references is known to its worker alone."""
    given = _at(spec, ("output", "destination"))
    if not isinstance(given, Mapping):
        return
    at: Path = ("output", "destination")
    kind, url, path = given.get("type"), given.get("url"), given.get("path")
    if kind == "s3":
        place = url if url is not None else path
        if place is None or (isinstance(place, str) and "${" not in place and not place.startswith("s3://")):
            told = "is missing" if place is None else f"is {show(place)}"
            yield (*at, "path" if url is None and path is not None else "url"), f"{told}; give s3://bucket/prefix"
    elif kind in ("http", "callback") and isinstance(url, str):
        if "${" not in url and not url.startswith(("http://", "https://")):
            yield (*at, "url"), f"is {show(url)}; give http://... or https://..."
    elif kind == "local" and isinstance(path, str) and "${" not in path and not path.startswith(("/", "~")):
        yield (*at, "path"), f"is {show(path)}; give an absolute path of the worker, such as /shared/results"
    headers = given.get("headers")
    for name, value in headers.items() if kind == "http" and isinstance(headers, Mapping) else ():
        is_bearer = not isinstance(value, str) or "${" in value or value.lower().startswith("bearer ")
        if str(name).lower() != "authorization" or not is_bearer:
            yield (
                (*at, "headers", str(name)),
                "is not sent to a results service: give `Authorization: Bearer ...` alone",
            )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _at(spec: Mapping[str, Any], path: Path) -> Any:
    value: Any = spec
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _take_out(spec: dict[str, Any], path: Path) -> None:
    holder: Any = spec
    for part in path[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(str(path[-1]), None)
