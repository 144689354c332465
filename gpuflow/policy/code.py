"""Finds the code that a task brings, and refuses what the worker's operator has not allowed (GPUFLOW_ALLOW_CODE). Pure.

A template is work, not a shell: with a command, remote model code or a class of the engine by name it would be one.
Looks at specs as they come, canonical or straight from the broker, so nothing is taken for granted of their form: what
cannot be judged before the child fills it in (`${env:NAME}`) counts as code. A container is judged by
`gpuflow.spec.container_policy`, and executors of GPUFLOW_EXECUTORS are the operator's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.policy.refusal import Refusal

#: The setting that allows code, and its word for all kinds.
SETTING: Final = "GPUFLOW_ALLOW_CODE"
ALL: Final = "all"
#: Kind of code -> what it is, as a clause after "the task brings".
KINDS: Final[Mapping[str, str]] = {
    "command": "a command of its own",
    "pickles": "weights that may hold code (pickle)",
    "plugins": "code of the engine by name",
    "project": "files or packages to run",
    "remote-code": "code of a model's repository",
}
#: Kinds that other task types than `command` may bring.
OF_MODELS: Final = ("pickles", "plugins", "remote-code")

#: Sections whose content is data of the task: no library reads arguments from it.
_DATA_SECTIONS: Final = frozenset({"echo", "query", "command", "container", "notify", "output", "resources", "env"})
#: Task types that read no such arguments: a container is judged by its image, and a function is the operator's own.
_NO_MODELS: Final = ("echo", "container", "function")
#: Fields with rows of data, wherever they stand.
_ROWS: Final = frozenset({"items", "prompts", "messages", "preferences"})
#: Arguments with a schema or values of the user's, which reach a template of text or a grammar alone.
_PLAIN: Final = frozenset({"structured_outputs", "response_format", "chat_template_kwargs", "extra_args"})
#: Fields of `command` beside the command itself that bring files or packages.
_PROJECT: Final = ("project", "upload", "url", "requirements", "python")
#: Arguments that import what they name, by any engine or trainer.
_PLUGINS: Final = frozenset(
    {
        "worker_cls", "worker_extension_cls", "scheduler_cls", "logits_processors", "reasoning_parser_plugin",
        "tool_parser_plugin", "io_processor_plugin", "model_class_overrides", "hf_config_path", "log_config_file",
        "logging_config", "megatron_core", "auto_mapping", "inductor_passes", "custom_generate", "rollout_func",
        "reward_funcs", "environment_factory",
    }
)  # fmt: skip
#: Ends of names of arguments that import what they name.
_PLUGIN_ENDS: Final = (
    "_cls", "_class", "_plugin", "_plugins", "_module", "_module_path", "_qualname", "_pass", "_passes", "_func", "_fn",
)  # fmt: skip
#: Ends of names of arguments whose text a library reads as JSON.
_ARGUMENTS: Final = ("_kwargs", "_config", "_overrides", "deepspeed", "fsdp")
#: Argument of vLLM -> values that vLLM itself brings; any other names a class, or what a plugin has registered.
_CHOICES: Final[Mapping[str, frozenset[str]]] = {
    "worker_cls": frozenset({"", "auto"}),
    "distributed_executor_backend": frozenset({"ray", "mp", "uni", "external_launcher"}),
    "load_format": frozenset(
        {
            "auto", "hf", "pt", "safetensors", "instanttensor", "npcache", "dummy", "runai_streamer",
            "runai_streamer_sharded", "bitsandbytes", "sharded_state", "gguf", "mistral", "modelexpress",
            "fastsafetensors",
        }
    ),
    "model_impl": frozenset({"auto", "vllm", "transformers", "terratorch"}),
    "vllm_model_impl": frozenset({"auto", "vllm", "transformers", "terratorch"}),
    "tokenizer_mode": frozenset({"auto", "hf", "slow", "fast", "mistral", "deepseek_v32", "deepseek_v4"}),
    "config_format": frozenset({"auto", "hf", "mistral"}),
    "megatron_core": frozenset({"megatron.core"}),
}  # fmt: skip
#: Arguments of `compilation_config` that choose sizes and modes; its others name functions, or load what was compiled.
_COMPILATION: Final = frozenset(
    {
        "level", "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "use_cudagraph",
        "cudagraph_num_of_warmups", "cudagraph_copy_inputs", "compile_sizes", "use_inductor", "full_cuda_graph",
        "debug_dump_path", "pass_config", "custom_ops", "backend",
    }
)  # fmt: skip
#: Depth and fields that are looked at; a spec with more of either is no work that anybody wrote.
_MOST_DEPTH: Final = 64
_MOST_FIELDS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Code:
    """One thing of a spec that is code: its kind, and where it stands."""

    kind: str
    path: str


class _TooMuch(Exception):
    """The spec is nested too deeply, or has too many fields, to be judged."""


def allowed_kinds(names: Collection[str]) -> frozenset[str]:
    """Return the kinds that the names of the setting allow: `all` for all of them, `none` for none."""
    given = {name.lower() for name in names}
    if "none" in given:
        return frozenset()
    return frozenset(KINDS) if ALL in given else frozenset(KINDS) & given


def kinds_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of code that a spec brings, sorted, each once."""
    return tuple(sorted({code.kind for code in code_in(spec)}))


def refusal(spec: Mapping[str, Any], allowed: Collection[str]) -> Refusal | None:
    """Return why a worker that allows these kinds does not run a spec; None where it does."""
    wanted = [code for code in code_in(spec) if code.kind not in allowed]
    if not wanted:
        return None
    kinds = sorted({code.kind for code in wanted})
    first = wanted[0]
    return Refusal(
        path=first.path,
        setting=SETTING,
        message=(
            f"{first.path} brings {KINDS[first.kind]} ({first.kind}), which this worker allows no task; "
            f"set {SETTING}={','.join(sorted({*allowed, *kinds}))} on a worker that is to run it, or leave it out"
        ),
    )


def code_in(spec: Mapping[str, Any]) -> list[Code]:
    """Return all code that a spec brings, in the order in which it stands there."""
    found: list[Code] = []
    if spec.get("taskType") in _NO_MODELS:
        return found
    if spec.get("taskType") == "command":
        found.append(Code(kind="command", path="taskType"))
        section = spec.get("command")
        if isinstance(section, Mapping):
            found += [Code(kind="project", path=f"command.{name}") for name in _PROJECT if section.get(name)]
    counted = iter(range(_MOST_FIELDS))
    try:
        for name, value in spec.items():
            if name not in _DATA_SECTIONS and name not in _ROWS and name != "merge_children":
                found += _arguments(str(name), value, (str(name),), counted)
    except _TooMuch:
        found.append(Code(kind="plugins", path="spec"))
    return found


def _arguments(name: str, value: Any, path: tuple[str, ...], counted: Iterator[int]) -> Iterator[Code]:
    """Yield what an argument, and all that is nested in it, brings."""
    if len(path) > _MOST_DEPTH or next(counted, None) is None:
        raise _TooMuch
    kind = _kind(name.strip().lower().replace("-", "_"), value, path)
    if kind is not None:
        yield Code(kind=kind, path=".".join(path))
        return
    if isinstance(value, str):
        value = _json_in(name, value)
        if value is None:
            yield Code(kind="plugins", path=".".join(path))
            return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _ROWS and key not in _PLAIN:
                yield from _arguments(str(key), item, (*path, str(key)), counted)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, Mapping | list | tuple):
                yield from _arguments("", item, (*path, str(index)), counted)


def _kind(name: str, value: Any, path: tuple[str, ...]) -> str | None:
    """Return the kind of code that one argument is; None for no code."""
    if name == "weights_only":
        return None if value is None or value is True else "pickles"
    if not value:
        return None
    if "trust_remote_code" in name:  # text is true for the libraries, whatever it says
        return "remote-code"
    if path[0] == "parameters":  # the arguments of the operator's own executor
        return None
    # Kernels of the hub are compiled code; an implementation that transformers brings has a plain name.
    if name == "attn_implementation" and any(sign in str(value) for sign in ("/", "${")):
        return "remote-code"
    # A model's own config.json can name such a kernel: then this alone lets it be loaded.
    if name in ("use_kernels", "allow_all_kernels") or (name == "kernel_config" and "transformers" in path):
        return "remote-code"
    if isinstance(value, bool | int | float):
        return None
    if name in _CHOICES:
        return None if isinstance(value, str) and value.lower() in _CHOICES[name] else "plugins"
    parent = path[-2] if len(path) > 1 else ""
    if parent == "compilation_config" and not _is_plain_compilation(name, value):
        return "plugins"
    if (parent == "speculative_config" and name == "method") or name == "spec_method":
        return "plugins" if any(sign in str(value) for sign in ("custom", ".", "/", "${")) else None
    return "plugins" if name in _PLUGINS or ("vllm" in path and name.endswith(_PLUGIN_ENDS)) else None


def _is_plain_compilation(name: str, value: Any) -> bool:
    if name == "backend":
        return value in ("", "eager", "inductor")
    return name in _COMPILATION


def _json_in(name: str, text: str) -> Any:
    """Return the mapping that a trainer or engine reads from text (`*_kwargs`, `*_config`), else the text itself.

    None where it cannot be judged: the child is to fill it in, or it is nested too deeply.
    """
    if not name.lower().endswith(_ARGUMENTS):
        return text
    if "${env:" in text:
        return None
    try:
        read = json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        return text
    return read if isinstance(read, Mapping | list) else text
