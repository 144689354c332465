"""How FlowMesh and MLOC train where a template does not say, and words of theirs that only their trainers read.

Used by `dialect` alone. What is left out is filled in, so that later readers of the spec need to know no dialect; what
changes what is trained and has no word in gpuflow/v1 is a mistake. The numbers are those of mlsys-io/FlowMesh,
src/worker/executors (sft, lora_sft, dpo, ppo), read in 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Findings, Path, Renames, show
from gpuflow.spec.sections import LORA, training_section

#: Task type -> what their trainer is given where `training` does not say.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sft": {"learning_rate": 5e-5, "num_train_epochs": 1, "per_device_train_batch_size": 2, "max_length": 1024},
    "lora_sft": {"learning_rate": 2e-4, "num_train_epochs": 1, "per_device_train_batch_size": 2, "max_length": 1024},
    "dpo": {"learning_rate": 5e-7, "num_train_epochs": 1, "per_device_train_batch_size": 4},
    "ppo": {"learning_rate": 1.41e-5, "num_train_epochs": 1, "per_device_train_batch_size": 1},
}
#: The adapter of lora_sft where `lora` does not say.
LORA_DEFAULTS: Final[Mapping[str, Any]] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
#: Of ppo: tokens of a prompt, and of an answer, where nothing says.
PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 64

_SUPERVISED: Final = ("sft", "lora_sft")
#: Fields of a file of rows that stand in `data` too.
_FIELDS: Final = (
    "prompt_field",
    "response_field",
    "completion_field",
    "text_field",
    "chosen_field",
    "rejected_field",
    "label_field",
)
_POSITIVE: Final = ("positive", "pos", "label_1")
_NEGATIVE: Final = ("negative", "neg", "label_0")
#: From which stage on DeepSpeed's ZeRO spreads the weights too; below it, the memory of one GPU is enough for them.
_SHARDED: Final = 3


def train_as_they_do(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """Rewrite a task spec of a foreign template in place, so that it is trained as its author knows it."""
    task_type = spec.get("taskType")
    if not isinstance(task_type, str) or task_type not in DEFAULTS:
        return
    training = spec.setdefault("training", {})
    if not isinstance(training, dict):
        return
    _data(spec, renamed, findings)
    _checkpoint(spec, training, findings, renamed)
    _quantised(spec, training, findings, renamed)
    _processes(spec, training, findings)
    _padding(training, str(task_type), findings)
    filled = _left_out(training, DEFAULTS[str(task_type)], training_section(str(task_type)).aliases)
    if task_type == "ppo":
        filled |= _answers(spec, training, findings, renamed)
        _reward(spec, findings, renamed)
    filled |= _precision(spec, training, str(task_type))
    if filled:
        findings.fill(("training",), _told(filled))
    if task_type == "lora_sft":
        _adapter(spec, findings)


def _left_out(section: dict[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Fill in what no name of a field says; return what was filled in."""
    given = {aliases.get(name, name) for name, value in section.items() if value is not None}
    filled = {name: value for name, value in defaults.items() if name not in given}
    for name in [name for name in section if aliases.get(name, name) in filled]:
        del section[name]  # null
    section.update(filled)
    return filled


def _told(filled: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {_value(value)}" for name, value in filled.items())
    return f"is left out in part, and filled in as FlowMesh has it: {values}"


def _value(value: Any) -> str:
    """Return a default as text; what the author wrote may stand in its place, and be anything."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "/".join(value)
    return value if value in ("bfloat16", "float16", "float32") else show(value)


def _adapter(spec: dict[str, Any], findings: Findings) -> None:
    checkpoint = spec.get("checkpoint")
    if isinstance(checkpoint, dict) and not _is_on(checkpoint.get("merge_first")):
        return  # it is trained on as it is
    lora = spec.setdefault("lora", {})
    if isinstance(lora, dict):
        filled = _left_out(lora, LORA_DEFAULTS, LORA.aliases)
        if filled:
            findings.fill(("lora",), _told(filled))


def _precision(spec: dict[str, Any], training: dict[str, Any], task_type: str) -> dict[str, Any]:
    """Without bf16 and fp16 they compute in float32 (sft, lora_sft); with them, a GPU holds the weights so too.

    A CPU holds them in float32 there, as ours does but for the frozen weights under an adapter.
    """
    if training.get("bf16") is None and training.get("fp16") is None:
        if task_type not in _SUPERVISED:
            return {}  # TRL's own choice, as here
        training["bf16"] = False
        return {"bf16": False}
    wanted = "bfloat16" if _is_on(training.get("bf16")) else None
    if _is_on(training.get("fp16")) and task_type == "lora_sft":
        wanted = wanted or "float16"
    if not _asks_gpu(spec):
        wanted = "float32" if wanted and task_type == "lora_sft" else None
    model = spec.get("model")
    if wanted is None or not isinstance(model, dict):
        return {}
    options = model.setdefault("transformers", {})
    if not isinstance(options, dict) or any(name in options for name in ("dtype", "torch_dtype")):
        return {}
    options["dtype"] = wanted
    return {"model.transformers.dtype": wanted}


def _asks_gpu(spec: Mapping[str, Any]) -> bool:
    resources = spec.get("resources")
    if isinstance(resources, str | list):
        return resources not in ("cpu", "")
    holders = [spec, resources, resources.get("hardware")] if isinstance(resources, Mapping) else [spec]
    if isinstance(resources, Mapping) and resources.get("accelerators") not in (None, "cpu"):
        return True
    gpus = [holder["gpu"] for holder in holders if isinstance(holder, Mapping) and isinstance(holder.get("gpu"), dict)]
    return any(gpu.get("count", 1) not in (0, "0") for gpu in gpus)


def _data(spec: dict[str, Any], renamed: Renames, findings: Findings) -> None:
    """Their spellings of where rows are: `jsonl_path`, `download_url`, and fields of a file beside it."""
    data = spec.get("data")
    if not isinstance(data, dict):
        return
    if isinstance(data.get("jsonl_path"), str):
        nested = data.setdefault("jsonl", {})
        path = data.pop("jsonl_path")
        if isinstance(nested, dict):
            nested.setdefault("path", path)
            renamed["data", "path"] = ("data", "jsonl_path")
    nested = data.get("jsonl")
    if isinstance(nested, dict):
        for name in ("headers", "download_headers"):
            if nested.get(name):
                findings.add(("data", "jsonl", name), "are not sent: a file of rows is fetched without; upload it")
            nested.pop(name, None)
        first = nested.pop("download_url", None)
        if first is not None:
            nested["url"] = first
            renamed["data", "url"] = ("data", "jsonl", "download_url")
        if spec.get("taskType") == "ppo":
            query = nested.pop("query_field", None) or data.pop("query_field", None) or "query"
            data.setdefault("columns", {"prompt": query})
            renamed["data", "columns", "prompt"] = ("data", "jsonl", "query_field")
        for name in _FIELDS:
            if name in data:
                nested.setdefault(name, data.pop(name))
    elif isinstance(data.get("text_field"), str) and spec.get("taskType") in _SUPERVISED:
        columns = data.setdefault("columns", {})
        text = data.pop("text_field")
        if isinstance(columns, dict) and not (data.get("prompt_column") and data.get("response_column")):
            columns.setdefault("text", text)
            renamed["data", "columns", "text"] = ("data", "text_field")
    if spec.get("taskType") == "dpo":
        _preference_columns(data)


def _preference_columns(data: dict[str, Any]) -> None:
    """Of the three columns of dpo a template may name some; the others are called as their roles are."""
    for holder, suffix in ((data.get("jsonl"), "field"), (data, "column")):
        names = [f"{role}_{suffix}" for role in ("prompt", "chosen", "rejected")]
        if isinstance(holder, dict) and not holder.keys().isdisjoint(names):
            for name in names:
                holder.setdefault(name, name.partition("_")[0])


def _checkpoint(spec: dict[str, Any], training: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    if spec.get("taskType") in _SUPERVISED and training.get("resume_from_path") is not None:
        path = training.pop("resume_from_path")
        if spec.get("checkpoint"):
            findings.warn(("training", "resume_from_path"), "is not used: checkpoint.load says what to begin from")
        else:
            spec["checkpoint"] = {"load": {"path": path}}
            renamed["checkpoint", "load", "path"] = ("training", "resume_from_path")
    checkpoint = spec.get("checkpoint")
    load = checkpoint.get("load") if isinstance(checkpoint, dict) else None
    if not isinstance(load, dict):
        return
    if load.pop("subdir", None):
        findings.add(("checkpoint", "load", "subdir"), "is not supported: an archive has one model; give that of it")
    has_place = load.get("url") is not None or load.get("path") is not None
    for name in ("taskId", "task_id"):
        if load.get(name) is not None and not has_place:
            findings.add(
                ("checkpoint", "load", name),
                "leads to no files here; write url: ${stage.final_model_archive_url}, or the URL of the archive",
            )
            del load[name]


def _quantised(spec: dict[str, Any], training: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """Weights of 4 or 8 bits are asked for in `training` there, and in the arguments of from_pretrained here."""
    four, eight = training.pop("load_in_4bit", None), training.pop("load_in_8bit", None)
    kind, double = training.pop("bnb_4bit_quant_type", None), training.pop("bnb_4bit_use_double_quant", None)
    if not (_is_on(four) or _is_on(eight)):
        return
    name = "load_in_4bit" if _is_on(four) else "load_in_8bit"
    if spec.get("taskType") != "lora_sft" and spec.get("lora") is None:
        findings.add(("training", name), "is asked for, and quantised weights cannot be trained; add the section lora")
        return
    config: dict[str, Any] = {"quant_method": "bitsandbytes", name: True}
    if name == "load_in_4bit":
        config |= {
            "bnb_4bit_quant_type": kind or "nf4",
            "bnb_4bit_use_double_quant": double is None or _is_on(double),
            "bnb_4bit_compute_dtype": "float16" if _is_on(training.get("fp16")) else "bfloat16",
        }
    model = spec.get("model")
    options = model.setdefault("transformers", {}) if isinstance(model, dict) else None
    if isinstance(options, dict):
        options.setdefault("quantization_config", config)
        renamed["model", "transformers", "quantization_config"] = ("training", name)


def _processes(spec: Mapping[str, Any], training: dict[str, Any], findings: Findings) -> None:
    """How their processes share the memory of a training: ours hold all of it each, unless fsdp spreads it."""
    if spec.get("taskType") != "sft":
        return
    automatic = training.pop("auto_deepspeed", None)
    stages = {name: training.pop(name, None) for name in ("auto_deepspeed_stage", "zero_stage")}
    given = next(((name, stage) for name, stage in stages.items() if stage is not None), None)
    is_off = automatic is not None and not _is_on(automatic)
    if training.get("deepspeed"):
        findings.warn(
            ("training", "deepspeed"),
            "needs DeepSpeed beside the worker, which no environment of gpuflow brings: without it the task fails "
            "before a model is loaded; fsdp: full_shard auto_wrap spreads a training without",
        )
        return
    if is_off or training.get("fsdp"):
        return
    if given is not None and _whole(given[1]) >= _SHARDED:
        findings.add(
            ("training", given[0]),
            f"is {show(given[1])}, which spreads the weights over the GPUs; write fsdp: full_shard auto_wrap",
        )
    elif given is not None or _gpus(spec) > 1:
        findings.warn(
            ("training", given[0]) if given is not None else ("training",),
            "leaves it to DeepSpeed there to spread the optimizer over the GPUs; here each GPU holds all of it, and "
            "the losses are the same. Where memory does not suffice, write fsdp: full_shard auto_wrap",
        )


def _gpus(spec: Mapping[str, Any]) -> int:
    resources = spec.get("resources")
    hardware = resources.get("hardware") if isinstance(resources, Mapping) else None
    gpu = hardware.get("gpu") if isinstance(hardware, Mapping) else None
    count = gpu.get("count") if isinstance(gpu, Mapping) else None
    return _whole(count)


def _padding(training: dict[str, Any], task_type: str, findings: Findings) -> None:
    side = training.get("padding_side")
    if side is None:
        return
    if task_type == "ppo":
        if side != "left":
            findings.add(("training", "padding_side"), f"is {show(side)}; PPO pads on the left")
    elif side not in ("left", "right"):
        findings.add(("training", "padding_side"), f"is {show(side)}; it must be left or right")
    elif side == "left" and task_type != "sft":  # where theirs pads on the right, whatever is written
        findings.warn(
            ("training", "padding_side"), "is not used: batches are filled up on the right, no loss depends on it"
        )
    del training["padding_side"]


def _answers(spec: dict[str, Any], training: dict[str, Any], findings: Findings, renamed: Renames) -> dict[str, Any]:
    """Of ppo: how long prompts and answers may be, at what temperature, and what ends an answer."""
    filled: dict[str, Any] = {}
    generation = spec.get("generation")
    section = generation if isinstance(generation, dict) else {}
    length = training.pop("max_seq_length", None)
    if training.get("response_length") is None and section.get("max_new_tokens") is None:
        training["response_length"] = ANSWER_TOKENS if length is None else length
        filled["response_length"] = training["response_length"]
        renamed["training", "response_length"] = ("training", "max_seq_length")
    if training.get("max_prompt_length") is None:
        training["max_prompt_length"] = PROMPT_TOKENS if length is None else length
        filled["max_prompt_length"] = training["max_prompt_length"]
        renamed["training", "max_prompt_length"] = ("training", "max_seq_length")
    if section.get("temperature") is not None and training.get("temperature") not in (None, section["temperature"]):
        findings.warn(("training", "temperature"), "is not used: generation.temperature counts")
        del training["temperature"]
    stop = section.pop("stop", None)
    if stop == "eos":
        training.setdefault("stop_token", "eos")
        renamed["training", "stop_token"] = ("generation", "stop")
    elif stop is not None:
        findings.add(("generation", "stop"), f"is {show(stop)}; TRL's PPO stops at eos, or at no token")
    return filled


def _reward(spec: dict[str, Any], findings: Findings, renamed: Renames) -> None:
    """Their sentiment is how far the positive class lies before the negative one, ours a probability."""
    reward = spec.get("reward_model")
    if not isinstance(reward, dict):
        return
    at: Path = ("reward_model",)
    if reward.get("scale") is not None:
        reward.setdefault("weight", reward.pop("scale"))
        renamed["reward_model", "weight"] = ("reward_model", "scale")
    for name, known in (("positive_label", _POSITIVE), ("negative_label", _NEGATIVE)):
        label = reward.pop(name, None)
        if label is not None and not (isinstance(label, str) and label.lower() in known):
            findings.add((*at, name), f"is {show(label)}; the classes are told by their names: {', '.join(known)}")
    longest = reward.pop("max_length", None)
    if longest not in (None, PROMPT_TOKENS):
        findings.add((*at, "max_length"), f"is {show(longest)}; an answer is scored up to {PROMPT_TOKENS} tokens of it")
    if reward.get("type") == "sentiment":
        reward.setdefault("score", "margin")
    elif reward.get("type") in (None, "model") and reward.get("identifier") is not None:
        findings.warn(at, "scores prompt and answer together, where FlowMesh scores the answer alone")


def _whole(value: Any) -> int:
    """Return a small number as it may be written; 0 for all else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6 else 0


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "on"))
