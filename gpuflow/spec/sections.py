"""Which sections of a spec each task type uses and needs, and which schema, aliases and own fields a section has.

Data only; used by `fields`, `checking`, `combinations` and `overlay`, and by `gpuflow.merge.keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuflow.protocol import FUNCTION_TYPE, is_user_type
from gpuflow.spec import bounds
from gpuflow.spec.bounds import Bound
from gpuflow.spec.function_section import INSTEAD

TASK_TYPES: Final = (
    "echo", "inference", "embedding", "rag", "sft", "lora_sft", "dpo", "ppo", "grpo", "reward", "command", "container",
    "function",
)  # fmt: skip

#: Task type -> schema of its `training` section.
TRAINING_SCHEMAS: Final[Mapping[str, str]] = {
    "sft": "sft", "lora_sft": "sft", "dpo": "dpo", "ppo": "ppo", "grpo": "grpo", "reward": "reward",
}  # fmt: skip

#: Task types whose calls are merged where nothing else is said (`merge: auto`), if they are deterministic.
MERGEABLE: Final = frozenset({"inference", "embedding", "rag"})
#: Those that are merged only where their author says so (`merge: always`), beside users' own task types.
MERGED_ON_DEMAND: Final = frozenset({"echo"})

_TRAINERS: Final = frozenset(TRAINING_SCHEMAS)

#: Section -> the task types of gpuflow that use it. A section that is not here is common to all.
USED_BY: Final[Mapping[str, frozenset[str]]] = {
    "training": _TRAINERS,
    "lora": _TRAINERS - {"sft"},
    "inference": frozenset({"inference", "rag"}),
    "engine": frozenset({"inference", "embedding", "rag"}),
    "reward_model": frozenset({"ppo", "grpo"}),
    "generation": frozenset({"ppo", "grpo"}),
    "qdrant": frozenset({"rag"}),
    "search": frozenset({"rag"}),
    "index": frozenset({"rag"}),
    "query": frozenset({"rag"}),
    "embedding": frozenset({"rag", "embedding"}),
    "checkpoint": _TRAINERS | {"inference", "embedding", "rag", "echo"},
    "echo": frozenset({"echo"}),
    "command": frozenset({"command"}),
    "container": frozenset({"container"}),
    "function": frozenset({"function"}),
    "parameters": frozenset(),
    "postprocess": frozenset({"inference"}),
    "model": _TRAINERS | {"inference", "embedding", "rag", "container", "echo"},  # echo: where it is placed
    "data": _TRAINERS | {"inference", "embedding", "rag", "echo"},
}

#: (section, field) -> the task types that use this part of a section that others use too.
PARTS_USED_BY: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("model", "vllm"): frozenset({"inference", "embedding"}),
    ("model", "adapters"): _TRAINERS | {"inference", "embedding", "rag"},
    ("model", "transformers"): _TRAINERS | {"inference", "embedding", "rag"},
    ("data", "eval_split"): _TRAINERS,
    ("data", "separator"): frozenset({"sft", "lora_sft"}),
}

#: Sections of a base that stages leave out which have no use for them: what else one says counts, or is refused.
LEFT_OUT: Final = tuple(USED_BY)

#: Sections that users' own executors use, beside those that are common to all.
_USED_BY_USERS: Final = frozenset({"parameters", "checkpoint", "inference", "lora", "model", "data"})

#: Task type -> sections of which each must be there; a tuple is a choice.
NEEDS: Final[Mapping[str, tuple[str | tuple[str, ...], ...]]] = {
    "inference": ("model", "data"),
    "embedding": (("model", "embedding"), "data"),
    "rag": (("data", "query"),),
    "sft": ("model", "data"),
    "lora_sft": ("model", "data"),
    "dpo": ("model", "data"),
    "ppo": ("model", "data", "reward_model"),
    "grpo": ("model", "data", "reward_model"),
    "reward": ("model", "data"),
    "command": ("command",),
    "container": ("container",),
    "function": ("function",),
    "echo": (),
}


def is_part_used(section: str, field: str, task_type: str) -> bool:
    """Say whether a task type uses a field of a section that it uses."""
    types = PARTS_USED_BY.get((section, field))
    return types is None or is_user_type(task_type) or task_type in types


def is_used(section: str, task_type: str) -> bool:
    """Say whether a task type uses a section."""
    if task_type == FUNCTION_TYPE and section in INSTEAD:
        return False
    if section not in USED_BY:
        return True
    return section in _USED_BY_USERS if is_user_type(task_type) else task_type in USED_BY[section]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section whose fields are a library's: schema name, short names, fields of ours, fields that gpuflow sets."""

    schema: str
    bounds: Mapping[str, Bound]
    aliases: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    managed: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    #: Of the fields with a hint, those that change no result: in a foreign template they are left out with a warning.
    harmless: frozenset[str] = frozenset()


_TRAINING_ALIASES: Final[Mapping[str, str]] = {
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "max_seq_length": "max_length",
    "steps": "max_steps",
    "save_freq": "save_steps",
    "ppo_epochs": "num_ppo_epochs",
    "log_with": "report_to",
    "tracker_project_name": "project",
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
}

_TRAINING_MANAGED: Final[Mapping[str, str]] = {
    "output_dir": "gpuflow gives every attempt its own folder; use output.destination for a copy",
    "local_rank": "gpuflow starts the processes; use nproc_per_node",
    "resume_from_checkpoint": "gpuflow resumes a task by itself; use checkpoint.load to begin from other weights",
    "visible_devices": "gpuflow chooses the GPUs; ask by resources.accelerators",
}

_TRAINING_HINTS: Final[Mapping[str, str]] = {
    "max_prompt_length": "TRL dropped it; max_length limits prompt and answer together",
    "max_seq_length": "this trainer has no such limit; ppo has response_length, grpo max_completion_length",
    "tokenizer": "the tokenizer comes with the model; set model.source",
    "epochs": "write num_train_epochs",
    "lr": "write learning_rate",
    "target_kl": "TRL's PPO has no such stop; use kl_coef",
    "early_stopping": "TRL's PPO has no such stop; use kl_coef",
}

INFERENCE: Final = Section(
    schema="sampling",
    bounds=bounds.SAMPLING,
    aliases={"max_new_tokens": "max_tokens", "stop_sequences": "stop", "num_return_sequences": "n"},
    own={
        "system_prompt": ("str", "null"),
        "stream": ("bool",),
        "batch_size": ("int",),
        "chat_template": ("str", "null"),
        "chat_template_kwargs": ("dict",),
        "add_generation_prompt": ("bool",),
        "no_repeat_ngram_size": ("int",),
    },
    managed={"output_kind": "use stream"},
    hints={"max_length": "write max_tokens", "num_beams": "beam search is not offered; use temperature: 0"},
)

LORA: Final = Section(
    schema="lora",
    bounds=bounds.LORA,
    aliases={"alpha": "lora_alpha", "dropout": "lora_dropout", "rank": "r"},
    managed={
        "base_model_name_or_path": "it is the model of the task; set model.source",
        "inference_mode": "it follows from the task type",
    },
)

ENGINE: Final = Section(
    schema="engine",
    bounds=bounds.ENGINE,
    managed={"model": "it is the model of the task; set model.source"},
    harmless=frozenset({"swap_space", "device"}),
    hints={
        "swap_space": "vLLM dropped it; use cpu_offload_gb or kv_offloading_size",
        "rope_scaling": "write it into hf_overrides",
        "rope_theta": "write it into hf_overrides",
        "device": "gpuflow chooses the device; ask by resources",
    },
)


def training_section(task_type: str) -> Section:
    """Return the section `training` of a task type that trains."""
    schema = TRAINING_SCHEMAS[task_type]
    aliases = dict(_TRAINING_ALIASES)
    if schema in ("ppo", "grpo"):
        del aliases["max_seq_length"]
    if schema != "ppo":
        del aliases["ppo_epochs"]
    return Section(
        schema=schema,
        bounds=bounds.TRAINING,
        aliases=aliases,
        own={
            "allow_multi_gpu": ("bool",),
            "nproc_per_node": ("int", "null"),
            "save_model": ("bool",),
            "merge_adapter": ("bool",),
            "allow_non_finite_loss": ("bool",),
            **({"max_prompt_length": ("int", "null")} if schema == "ppo" else {}),
        },
        managed=_TRAINING_MANAGED,
        hints=_TRAINING_HINTS,
        harmless=frozenset({"target_kl"}),
    )
