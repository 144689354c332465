"""The small types that the models share: base class, numbers without surprises, durations, memory, paths.

Used by the `models_*` files alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gpuflow.spec.container_policy import read_image, split_mount
from gpuflow.spec.env_names import problem_of
from gpuflow.spec.function_section import argument_problem, name_problem
from gpuflow.spec.patterns import metric_pattern
from gpuflow.spec.report import show
from gpuflow.spec.units import cpu_count, duration_seconds, memory_mib
from gpuflow.spec.written import text_of

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Ten years, in seconds: longer is a slip of the keyboard.
MAX_SECONDS: Final = 10 * 365 * 86400
#: Environment variables that gpuflow itself sets for a child, or keeps from it.
RESERVED_ENV: Final = frozenset(
    {
        "REDIS_URL", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CHECKPOINT_DIR", "RESUME_FROM", "TASK_ID", "ATTEMPT",
        "GPU_DEVICE", "RESULTS_DIR", "MODEL_PATH", "MODEL_NAME", "NOTICE_SECONDS", "OUTPUT_DIR", "GPUFLOW_WORKER_TOKEN",
        "GPUFLOW_ENVIRONMENT", "GPUFLOW_ENGINE",
    }
)  # fmt: skip


class Strict(BaseModel):
    """A part of a template: unknown fields are refused, numbers are finite."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"is {show(value)}; it must be a number")
    return value


def _number_text(value: Any) -> Any:
    """Numbers and booleans where text is wanted (an environment value, a label) become text, numbers as written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return text_of(value) if isinstance(value, int | float) else value


def _bool_words(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "false", "no", "off"):
        return value.lower() in ("true", "yes", "on")
    raise ValueError(f"is {show(value)}; it must be true or false")


def _checked(check: Callable[[Any], Any], positive: bool) -> Callable[[Any], Any]:
    def validate(value: Any) -> Any:
        try:
            amount = check(value)
        except ValueError as error:
            raise ValueError(f"{show(value)} {error}") from None
        if positive and not 0 < amount <= MAX_SECONDS * 1024:
            raise ValueError(f"{show(value)} is out of range; give an amount above 0")
        return value

    return validate


def _duration(value: Any) -> Any:
    try:
        seconds = duration_seconds(value)
    except ValueError as error:
        raise ValueError(f"{show(value)} {error}") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{show(value)} is out of range; give more than 0 seconds and at most ten years")
    return value


def _env_name(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise ValueError(f"{show(value)} is no name of an environment variable; use letters, digits and _")
    if value in RESERVED_ENV:
        raise ValueError(f"{value} is set by gpuflow; choose another name")
    return value


def _settable_env_name(value: str) -> str:
    if problem := problem_of(value):
        raise ValueError(problem)
    return value


def _relative(value: str) -> str:
    if value.startswith(("/", "~")) or "\\" in value or ".." in value.split("/") or "\0" in value:
        raise ValueError(f"{show(value)} must stay inside the output folder; give a relative path without ..")
    return value


def _one_or_many(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"is {show(value)}; it must be text or a list of texts")
    return value


def _text_or_list(value: Any) -> Any:
    """A command: a line for the shell, or a list of arguments."""
    if isinstance(value, list) and value and all(isinstance(v, str | int | float) for v in value):
        return [_number_text(v) for v in value]
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"is {show(value)}; it must be a command line, or a list of arguments")


def _metric_pattern(text: str) -> str:
    metric_pattern(text)
    return text


def _image(text: str) -> str:
    if "${" not in text:  # a reference is replaced first; the worker looks at what comes of it
        read_image(text)
    return text


def _container_mount(text: str) -> str:
    if "${" not in text:
        split_mount(text)
    return text


def _function_name(value: str) -> str:
    if problem := name_problem(value):
        raise ValueError(problem)
    return value


def _argument_name(value: str) -> str:
    if problem := argument_problem(value):
        raise ValueError(problem)
    return value


def _argument_choice(value: Any) -> Any:
    is_place = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_place or (isinstance(value, str) and argument_problem(value) is None):
        return value
    raise ValueError(f"is {show(value)}; it must be the name of an argument, or its place in args, from 0")


def _shell_choice(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value.startswith("/")):
        return value
    raise ValueError(f"is {show(value)}; it must be true, false, or the absolute path of a shell")


Whole = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Flag = Annotated[bool, BeforeValidator(_bool_words)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, BeforeValidator(_number_text)]
Duration = Annotated[Any, BeforeValidator(_duration)]
Memory = Annotated[Any, BeforeValidator(_checked(memory_mib, positive=True))]
Cpus = Annotated[Any, BeforeValidator(_checked(cpu_count, positive=True))]
EnvName = Annotated[str, AfterValidator(_env_name)]
SettableEnvName = Annotated[EnvName, AfterValidator(_settable_env_name)]
RelativePath = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_relative)]
TextOrList = Annotated[Any, BeforeValidator(_text_or_list)]
OneOrMany = Annotated[Any, BeforeValidator(_one_or_many)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
MetricPattern = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_metric_pattern)]
ShellChoice = Annotated[Any, BeforeValidator(_shell_choice)]
FunctionName = Annotated[str, AfterValidator(_function_name)]
ArgumentName = Annotated[str, AfterValidator(_argument_name)]
ArgumentChoice = Annotated[Any, BeforeValidator(_argument_choice)]
ImageName = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_image)]
ContainerMount = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_container_mount)]
