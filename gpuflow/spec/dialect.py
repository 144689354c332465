"""What flowmesh/v1 and mloc/v1 mean where gpuflow/v1 would mean something else. Used by `normalise` alone.

Each rewriting puts into the spec what the author of such a template counts on, in the words of gpuflow/v1, so that
whoever reads the spec later needs to know no dialect.
"""

from __future__ import annotations

import re
from typing import Any, Final

from gpuflow.spec.dialect_training import train_as_they_do
from gpuflow.spec.engines import chooses_engine
from gpuflow.spec.presets import names_preset
from gpuflow.spec.references import walk_references
from gpuflow.spec.report import Findings, Path, Renames, show
from gpuflow.spec.structured import schema_of

#: How FlowMesh and MLOC sample where a template does not say: each value, with the names by which it may be given.
_SAMPLING: Final = {
    "temperature": (0.7, ("temperature",)),
    "top_p": (0.95, ("top_p",)),
    "max_tokens": (512, ("max_tokens", "max_new_tokens")),
}
#: What they put between prompt and answer of a training row.
_SEPARATOR: Final = "\n\n"
_SUPERVISED: Final = ("sft", "lora_sft")
_ENGINES: Final = ("vllm", "transformers")
_WITH_ENGINES: Final = ("inference", "embedding")
_OF_THE_CONFIG: Final = ("rope_scaling", "rope_theta")
_TEMPLATES: Final = ("two_column_briefing", "format")
#: Their name of the result file, and ours.
_THEIR_RESULTS, _OUR_RESULTS = "results.json", "responses.json"
_ENV_STYLE: Final = re.compile(r"(?<!\$)\$\{([A-Z_][A-Z0-9_]*)\}")
#: What a variable is called that holds a secret.
_SECRET: Final = re.compile(r"(?:^|_)(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)")
_ARCHIVE: Final = re.compile(r"(?<!\$)\$\{([A-Za-z0-9][\w-]*(?:\.result)?\.final_(?:lora|model|index)_archive)\}")
#: Where an archive is fetched by its URL: section, the mapping inside it (a list of them, for adapters).
_FETCHED: Final = (("checkpoint", "load"), ("model", "adapters"), ("search", "index"), ("reward_model", None))


def translate(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """Rewrite a task spec of a foreign template in place; what cannot be honoured is a mistake."""
    if spec.get("condition") is not None:
        # Left out with a warning, what its author meant to skip would run, and be paid for.
        findings.add(("condition",), "is for a stage, which runs only if it holds; a single task has none before it")
    _enforce_cpu(spec, renamed)
    if any(isinstance(found, ValueError) for _, found in walk_references(spec)):
        for key, value in spec.items():
            spec[key] = _env_style(value)
        _secrets(spec)
    _parallel(spec, findings)
    _sampling(spec, findings)
    _structured(spec, findings, renamed)
    _model(spec, findings, renamed)
    _archives(spec, renamed)
    _joined_text(spec)
    _ppo(spec, findings)
    train_as_they_do(spec, findings, renamed)
    _output(spec)
    data = spec.get("data")
    if isinstance(data, dict):
        _graph_template(data, findings)
        _metadata(data, findings, spec.get("taskType"))


def _secrets(spec: dict[str, Any]) -> None:
    """Name as secrets what looks like one among the variables of their worker; the task would not get it otherwise."""
    env, named = _mapping(spec.get("env")), spec.get("secrets")
    found = {
        str(one.name)
        for _, one in walk_references(spec)
        if not isinstance(one, ValueError) and one.kind == "env" and _SECRET.search(str(one.name))
    } - set(env)
    if found and (named is None or isinstance(named, list)):
        kept = named or []
        spec["secrets"] = [*kept, *sorted(name for name in found if name not in kept)]


def _enforce_cpu(spec: dict[str, Any], renamed: Renames) -> None:
    if not isinstance(spec.get("enforce_cpu"), bool):
        return
    if spec.pop("enforce_cpu"):
        resources = spec.setdefault("resources", {})
        hardware = resources.setdefault("hardware", {}) if isinstance(resources, dict) else None
        if isinstance(hardware, dict):
            hardware["gpu"] = {"count": 0}
            renamed["resources", "hardware", "gpu"] = ("enforce_cpu",)


def _parallel(spec: dict[str, Any], findings: Findings) -> None:
    """Where nothing says how many tasks share the rows, or two numbers do, it is told; no result depends on it."""
    parallel, resources = spec.get("parallel"), spec.get("resources")
    if not isinstance(parallel, dict) or parallel.get("enabled") is False:
        return
    most, replicas = parallel.get("max_shards"), _mapping(resources).get("replicas")
    several = isinstance(replicas, int) and replicas > 1
    if parallel.get("enabled") is True and most is None and not several:
        findings.warn(
            ("parallel", "max_shards"), "is missing: one task runs; give the number of tasks that share the data"
        )
        del spec["parallel"]
    elif isinstance(resources, dict) and several and isinstance(most, int) and most != replicas:
        findings.warn(
            ("resources", "replicas"), f"is {replicas}, but parallel.max_shards is {most}, which counts; keep one"
        )
        spec["resources"] = {name: value for name, value in resources.items() if name != "replicas"}


def _sampling(spec: dict[str, Any], findings: Findings) -> None:
    """Write out the sampling that the author counts on; ours differs."""
    if spec.get("taskType") != "inference":
        return
    section = spec.setdefault("inference", {})
    if not isinstance(section, dict):
        return
    filled = []
    for name, (value, spellings) in _SAMPLING.items():
        is_greedy = name == "temperature" and section.get("do_sample") is False
        if not is_greedy and all(section.get(spelling) is None for spelling in spellings):
            section[name] = value
            filled.append(f"{name} {value}")
    if filled:
        findings.fill(("inference",), f"is left out in part, and filled in as FlowMesh has it: {', '.join(filled)}")


def _structured(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """`inference.templates` is a JSON schema, or fields that make one; answers have no whitespace between tokens."""
    section = spec.get("inference")
    if not isinstance(section, dict) or section.get("templates") is None:
        return
    if section.get("structured_outputs") is not None:
        findings.add(("inference", "templates"), "and structured_outputs both say what answers are; keep one")
        return
    schema = schema_of(section.pop("templates"), findings)
    compact = section.pop("disable_any_whitespace", True)
    if schema is not None:
        section["structured_outputs"] = {"json": schema, "disable_any_whitespace": compact}
        renamed["inference", "structured_outputs"] = ("inference", "templates")


def _model(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """A preset by its bare name; and the section of an engine is a word for that engine."""
    model = spec.get("model")
    if not isinstance(model, dict):
        return
    source = model.get("source")
    if (
        isinstance(source, dict)
        and source.get("type") in (None, "huggingface")
        and names_preset(source.get("identifier"))
    ):
        source["type"] = "preset"
    _overrides(_mapping(model.get("vllm")), renamed)
    if spec.get("taskType") not in _WITH_ENGINES or spec.get("engine") or spec.get("environment"):
        return
    meant = [name for name in _ENGINES if model.get(name)]
    if meant == ["transformers"]:
        spec["engine"] = "transformers"
    elif meant == ["vllm"] and not chooses_engine(spec):
        findings.warn(
            ("model", "vllm"),
            "asks for vLLM: on a worker without it transformers answers, these arguments are not used, and the result "
            "says so; `engine: vllm` keeps the task from such workers",
        )


def _overrides(engine: dict[str, Any], renamed: Renames) -> None:
    """Arguments of the model's own configuration stand among vLLM's there."""
    for name in _OF_THE_CONFIG:
        if engine.get(name) is not None and isinstance(engine.setdefault("hf_overrides", {}), dict):
            engine["hf_overrides"].setdefault(name, engine.pop(name))
            renamed["model", "vllm", "hf_overrides"] = ("model", "vllm", name)


def _archives(spec: dict[str, Any], renamed: Renames) -> None:
    """`${stage.final_lora_archive}`, a path on the machine of that stage, is its `_archive_url` where it is fetched."""
    for section, inside in _FETCHED:
        holder = spec.get(section)
        if inside is not None:
            holder = holder.get(inside) if isinstance(holder, dict) else None
        at: Path = (section,) if inside is None else (section, inside)
        entries = enumerate(holder) if isinstance(holder, list) else [(None, holder)]
        for index, entry in entries:
            if isinstance(entry, dict):
                _by_url(entry, at if index is None else (*at, index), renamed)


def _by_url(entry: dict[str, Any], at: Path, renamed: Renames) -> None:
    for name in ("url", "path"):
        found = _ARCHIVE.fullmatch(entry[name]) if isinstance(entry.get(name), str) else None
        if found:
            del entry[name]
            entry["url"] = f"${{{found[1]}_url}}"
            if entry.get("type") in ("path", "local"):
                entry["type"] = "http"
            renamed[(*at, "url")] = (*at, name)


def _joined_text(spec: dict[str, Any]) -> None:
    """Prompt, separator and answer are one text there, and all of it is learned; here the answer alone would be."""
    data = spec.get("data")
    if spec.get("taskType") not in _SUPERVISED or not isinstance(data, dict):
        return
    nested, columns = _mapping(data.get("jsonl")), _mapping(data.get("columns"))
    fields = {*data, *nested, *columns}
    has_prompt = bool(fields & {"prompt_column", "prompt_field", "prompt"})
    has_answer = bool(
        fields & {"response_column", "completion_column", "response_field", "completion_field", "completion"}
    )
    if not (has_prompt and has_answer):
        return
    if data.get("separator") is None and nested.get("separator") is None:
        data["separator"] = _SEPARATOR
    training = spec.setdefault("training", {})
    if isinstance(training, dict) and training.get("completion_only_loss") is None:
        training["completion_only_loss"] = False


def _ppo(spec: dict[str, Any], findings: Findings) -> None:
    """A stop by KL, which TRL's PPO has no longer, changes what is trained; without it, its limit changes nothing."""
    training = spec.get("training")
    if spec.get("taskType") != "ppo" or not isinstance(training, dict):
        return
    stops = training.pop("early_stopping", None)
    if stops not in (None, False):
        findings.add(
            ("training", "early_stopping"),
            "is asked for, and TRL's PPO has no stop by KL: it would train on; take it out (kl_coef holds the KL down)",
        )
    if stops is not None:
        training.pop("target_kl", None)


def _output(spec: dict[str, Any]) -> None:
    """`results.json` is their name of the result file; `http` with a url is a POST of the result to that URL."""
    output = spec.get("output")
    if not isinstance(output, dict):
        return
    artifacts = output.get("artifacts")
    if isinstance(artifacts, list) and _THEIR_RESULTS in artifacts and output.get("aliases") is None:
        output["aliases"] = {_THEIR_RESULTS: _OUR_RESULTS}
    destination = output.get("destination")
    if not isinstance(destination, dict) or destination.get("type") != "http":
        return
    if destination.get("url"):
        destination["type"] = "callback"
    else:  # the fleet's own store: its protocol and its patience are ours
        for name in ("method", "timeoutSec"):
            destination.pop(name, None)


def _graph_template(data: dict[str, Any], findings: Findings) -> None:
    """A template without a name is the briefing, one of an unknown name is its `text`."""
    template = data.get("template")
    if not isinstance(template, dict):
        return
    name, text = template.get("name"), template.get("text")
    if name is None and text is None:
        template["name"] = "two_column_briefing"
    elif name not in _TEMPLATES and isinstance(text, str):
        template["name"] = "text"
    elif text is not None and name in _TEMPLATES:
        findings.warn(("data", "template", "text"), f"is not used: the template is {name}")
        del template["text"]
    if template.get("name") == "two_column_briefing":
        options = _mapping(template.get("options"))
        lacking = [name for name in ("intro", "closing") if not options.get(name)]
        if lacking:
            findings.warn(
                ("data", "template"),
                f"has no options.{' and no options.'.join(lacking)}: what stands there then means what FlowMesh's "
                "does, in other words; write it out to choose the words",
            )


def _metadata(data: dict[str, Any], findings: Findings, task_type: Any) -> None:
    """`metadata` has a mapping for each item; it goes into the item's record, and comes back beside the answer."""
    if data.get("metadata") is None:
        return
    rows = data.pop("metadata")
    if task_type != "inference":
        findings.add(("data", "metadata"), f"comes back beside the answers of inference, not of {show(task_type)}")
        return
    field = next((name for name in ("items", "prompts") if isinstance(data.get(name), list)), None)
    if field is None:
        findings.add(("data", "metadata"), "is for items that are written out; a data set brings its own columns")
        return
    if not isinstance(rows, list) or len(rows) != len(data[field]):
        count = f"a list of {len(rows)}" if isinstance(rows, list) else show(rows)
        findings.add(("data", "metadata"), f"is {count}; it must be a list of {len(data[field])}, one for each item")
        return
    for index, row in enumerate(rows):
        if row is not None and not isinstance(row, dict):
            findings.add(("data", "metadata", index), f"is {show(row)}; it must be a mapping")
    data["items"] = [_record(item, row) for item, row in zip(data.pop(field), rows, strict=True)]
    data["type"] = "list"


def _record(item: Any, row: Any) -> Any:
    if not isinstance(row, dict) or not row:
        return item
    if isinstance(item, dict):
        return {**item, "metadata": row}
    return {"messages" if isinstance(item, list) else "prompt": item, "metadata": row}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _env_style(value: Any) -> Any:
    if isinstance(value, str):
        return _ENV_STYLE.sub(r"${env:\1}", value)
    if isinstance(value, dict):
        return {key: _env_style(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_env_style(item) for item in value]
    return value
