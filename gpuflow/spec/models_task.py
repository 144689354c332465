"""The model of a task spec: the template's vocabulary at the top level, and what holds for every task type.

Used by `checking`. The sections training, lora, inference and model.vllm are plain mappings here: `fields` has them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gpuflow.protocol import is_user_type
from gpuflow.spec.models_data import Data, Generation, RewardModel
from gpuflow.spec.models_kinds import (
    Checkpoint,
    Command,
    Container,
    Echo,
    Embedding,
    Function,
    Index,
    Model,
    Output,
    Postprocess,
    Qdrant,
    Search,
)
from gpuflow.spec.models_resources import Resources
from gpuflow.spec.models_types import (
    Duration,
    EnvName,
    Flag,
    Name,
    Number,
    OneOrMany,
    SettableEnvName,
    Strict,
    Text,
    Whole,
)
from gpuflow.spec.report import one_of, show
from gpuflow.spec.sections import TASK_TYPES

_ENVIRONMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _known_type(value: str) -> str:
    if value not in TASK_TYPES and not is_user_type(value):
        raise ValueError(f"is {show(value)}; it must be {one_of(TASK_TYPES)}, or the owner.name of a user's own")
    return value


def _environment_name(value: str) -> str:
    if _ENVIRONMENT.fullmatch(value) is None:
        raise ValueError(f"is {show(value)}; an environment's name has letters, digits, '.', '_' and '-'")
    return value


TaskType = Annotated[str, AfterValidator(_known_type)]
EnvironmentName = Annotated[str, AfterValidator(_environment_name)]


class Retry(Strict):
    """When a task is tried again."""

    max_attempts: Whole | None = Field(None, ge=1, le=100, description="Attempts in all, the first included")
    backoff_seconds: Number | None = Field(None, ge=0, le=604_800, description="Wait before the next attempt")


class Parallel(Strict):
    """Splitting the rows of one stage's data over several tasks. `enabled: false` switches it off."""

    enabled: Flag | None = None
    max_shards: Whole | None = Field(None, ge=1, le=1024, description="Tasks that share the rows")


class Notification(Strict):
    """A URL to call when a task has ended in one of the states (`finished`: in any)."""

    on: list[Literal["succeeded", "failed", "cancelled", "dead", "finished"]] = Field(min_length=1)
    url: Name
    headers: dict[Name, Text] | None = None
    method: Literal["POST", "PUT", "post", "put"] | None = Field(None, description="POST if unset")
    body: Literal["status", "result"] | None = Field(None, description="What is sent; status if unset")
    timeoutSec: Number | None = Field(None, gt=0, le=60, description="Seconds for the call; 10 if unset")  # noqa: N815
    retries: Whole | None = Field(None, ge=0, le=10, description="Further tries; 5 if unset")
    secret: Text | None = Field(None, description="Key of the signature: ${env:NAME} of a secret of the task")


class TaskSpec(Strict):
    """One task."""

    taskType: TaskType = Field(description="Which executor runs it")  # noqa: N815
    resources: Resources | None = None
    model: Model | None = None
    checkpoint: Checkpoint | None = None
    data: Data | None = None
    inference: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    reward_model: RewardModel | None = None
    generation: Generation | None = None
    qdrant: Qdrant | None = None
    embedding: Embedding | None = None
    index: Index | None = Field(None, description="Make an index of the documents of data")
    search: Search | None = None
    query: OneOrMany | None = Field(None, description="A question, or a list of them")
    echo: Echo | None = None
    command: Command | None = None
    container: Container | None = None
    function: Function | None = Field(None, description="A team's function to call: its name, or a mapping")
    parameters: dict[str, Any] | None = Field(None, description="Of a user's own task type")
    output: Output | None = None
    postprocess: Postprocess | None = Field(None, description="Files that are made of the result")
    parallel: Parallel | None = None
    env: dict[SettableEnvName, Text] | None = Field(None, description="Environment of the child")
    secrets: list[EnvName] | None = Field(None, max_length=100, description="Variables that the worker may pass on")
    notify: list[Notification] | None = Field(None, max_length=10)
    retry: Retry | None = None
    timeout: Duration | None = Field(None, description="Seconds, or text such as 2h; after it the task fails")
    priority: Whole | None = Field(None, ge=0, le=9, description="9 first; 5 where unset")
    merge: Literal["auto", "always", "never"] | None = None
    target: Literal["worker", "local", "auto"] | None = None
    engine: Literal["auto", "vllm", "transformers"] | None = Field(
        None, description="What answers; auto: vLLM where its environment works, else transformers"
    )
    environment: EnvironmentName | None = Field(None, description="The environment that the executor runs in")
    sloSeconds: Number | None = Field(None, gt=0, le=315_360_000)  # noqa: N815
    resultTtlSeconds: Number | None = Field(None, ge=0, le=315_360_000)  # noqa: N815

    @model_validator(mode="after")
    def _one_way_to_run(self) -> Self:
        if self.environment is not None and self.engine not in (None, "auto"):
            raise ValueError(f"has engine {self.engine} and environment {show(self.environment)}; keep one of them")
        return self


class Metadata(Strict):
    """Who and what, for people and listings."""

    name: str | None = Field(None, min_length=1, max_length=200)
    owner: str | None = Field(None, max_length=200)
    labels: dict[Name, Text] | None = None
    annotations: dict[str, Any] | None = None
