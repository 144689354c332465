"""The shapes of what the HTTP API answers and takes, as its OpenAPI document shows them.

Fields that are empty are left out of answers. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

_ID = "6f1d4c1e-6a0b-5f0e-9b57-0f9f2f1f7f10"


class Shape(BaseModel):
    """What is answered."""

    model_config = ConfigDict(extra="allow")


class Mistake(BaseModel):
    """One mistake of what was sent."""

    path: str = Field(description="Where: spec.training.max_steps", examples=["spec.training.max_steps"])
    message: str = Field(description="The cause, and what to write instead")


class ProblemShape(BaseModel):
    """An error, as RFC 9457 has it (application/problem+json)."""

    type: str = Field(description="What programs tell problems apart by", examples=["urn:gpuflow:problem:unknown"])
    title: str = Field(description="The phrase of the status", examples=["Not Found"])
    status: int = Field(description="The HTTP status", examples=[404])
    detail: str = Field(description="Cause and remedy, for people", examples=["no task 'x'"])
    errors: list[Mistake] | None = Field(None, description="Every mistake of the body or the parameters")


class TaskShape(Shape):
    """One task."""

    id: str = Field(examples=[_ID])
    state: str = Field(description="docs/reference/states.md", examples=["RUNNING"])
    queue: str | None = Field(None, examples=["gpu-40g-n1"])
    name: str | None = None
    owner: str | None = None
    labels: dict[str, str] | None = Field(
        None, description="metadata.labels of its template", examples=[{"team": "nlp"}]
    )
    task_type: str | None = Field(None, alias="taskType", examples=["inference"])
    attempt: int | None = Field(None, description="The current attempt; 0 before the first")
    worker: str | None = None
    pipeline: str | None = Field(None, description="Id of the pipeline that it belongs to")
    stage: str | None = None
    created_at: float | None = Field(None, alias="createdAt")
    started_at: float | None = Field(None, alias="startedAt")
    finished_at: float | None = Field(None, alias="finishedAt")
    progress: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class TaskDetail(TaskShape):
    """One task with its result and its attempts."""

    result: Any = Field(None, description="Where it has succeeded; large fields are references {'$artifact': ...}")
    attempts: list[dict[str, Any]] | None = Field(None, description="How each ended attempt went")


class TaskPage(BaseModel):
    """Tasks, the newest first."""

    tasks: list[TaskShape]
    next: str | None = Field(None, description="The `cursor` of the next page; null on the last")


class Submitted(BaseModel):
    """What was submitted."""

    id: str = Field(examples=[_ID])
    kind: Literal["task", "pipeline"]
    url: str = Field(description="Where its state is", examples=[f"/api/v1/tasks/{_ID}"])
    events: str = Field(description="Where its events are", examples=[f"/api/v1/tasks/{_ID}/events"])
    warnings: list[str] = Field(description="What was not used, and what no live worker can run now")


class Ended(BaseModel):
    """What became of a cancel, a retry or a resume."""

    id: str = Field(examples=[_ID])
    outcome: str = Field(
        description="cancelled, requested (its worker stops it now), final (it had ended before); queued; resumed, "
        "running, succeeded",
        examples=["cancelled"],
    )


class StageShape(Shape):
    """One stage of a pipeline."""

    name: str
    state: str
    depends_on: list[str] = Field(alias="dependsOn")
    error: dict[str, Any] | None = None
    reason: str | None = Field(None, description="Why it was skipped")
    tasks: list[TaskShape]


class PipelineShape(Shape):
    """One pipeline."""

    id: str
    name: str
    state: str = Field(examples=["RUNNING"])
    owner: str
    created_at: float = Field(alias="createdAt")
    finished_at: float | None = Field(None, alias="finishedAt")
    error: dict[str, Any] | None = None


class PipelineDetail(PipelineShape):
    """One pipeline with its stages."""

    stages: list[StageShape]


class PipelinePage(BaseModel):
    """Pipelines, the newest first."""

    pipelines: list[PipelineShape]
    next: str | None = Field(None, description="The `cursor` of the next page; null on the last")


class QueueSubmit(BaseModel):
    """A shipped configuration by name, for the fleet."""

    model_config = ConfigDict(extra="forbid")

    config_name: str = Field(min_length=1, max_length=200, examples=["quickstart"])
    target: Literal["worker", "auto", "local"] = Field(
        "worker", description="worker and auto: the fleet. local is refused: a gateway runs nothing itself"
    )
    worker_labels: dict[str, str] = Field(
        default_factory=dict, max_length=100, description="Globs against the labels of workers",
        examples=[{"gpu_type": "a100*"}],
    )  # fmt: skip


class StandingShape(Shape):
    """One thing that is to be known of a worker."""

    kind: str = Field(examples=["disk-full"])
    text: str = Field(description="Goes on after the worker's name", examples=["is silent: last heard of 12 s ago"])
    takes_nothing: bool = Field(alias="takesNothing", description="Whether it takes nothing new while this lasts")


class WorkerShape(Shape):
    """One worker."""

    id: str
    state: str = Field(examples=["IDLE"])
    standing: list[StandingShape] = Field(description="What is to be known of it beside IDLE and BUSY")
    enabled: bool
    hostname: str
    tasks: list[str]
    queues: list[str]


class WorkerList(BaseModel):
    """The workers of the fleet, by id."""

    workers: list[WorkerShape]


class AuditEntry(Shape):
    """One entry of the audit log."""

    id: str = Field(description="Its place in the log", examples=["1764086400000-0"])
    at: float = Field(description="When, Unix seconds on the broker's clock")
    action: str = Field(examples=["task.cancel"])
    actor: str = Field(description="Who", examples=["ana@laptop", "worker:w1"])
    target: str = Field(examples=["task:6f1d4c1e"])
    details: dict[str, str]


class AuditPage(BaseModel):
    """Entries of the audit log, the newest first."""

    entries: list[AuditEntry]
    next: str | None = Field(description="`cursor` of the next page; null: there is none")


class QueueShape(Shape):
    """One queue."""

    name: str
    requirement: dict[str, Any] | None = Field(None, description="What its tasks ask for; null: plain Celery tasks")
    waiting: int
    oldest_at: float | None = Field(
        None, alias="oldestAt", description="When its oldest message was sent, Unix seconds; null: none waits"
    )
    running: int
    workers: list[str] = Field(description="Ids of the workers that serve it and take new work")


class QueueList(BaseModel):
    """The queues of the fleet."""

    queues: list[QueueShape]


class ExplanationList(BaseModel):
    """Why a task waits, or where it runs (docs/reference/explain.md)."""

    explanations: list[dict[str, Any]]


class NewWorker(BaseModel):
    """A worker that is to have a token of its own."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$", examples=["gpu-box-2"])
    labels: dict[str, str] = Field(default_factory=dict, max_length=100, examples=[{"site": "a"}])
    type: Literal["persistent", "ephemeral"] = Field("persistent", validation_alias=AliasChoices("type", "worker_type"))
    queues: list[Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-9;-~]+$")]] = Field(
        default_factory=list, max_length=100, description="Plain Celery queues that it may serve beside demand queues"
    )
    only_fleet: bool = Field(
        False,
        alias="onlyFleet",
        description="The broker has no other fleet, and nobody else reaches its port; needed without a prefix of keys",
    )


class AdminWorker(Shape):
    """A worker with a token of its own."""

    id: str = Field(description="Id of its token")
    name: str
    labels: dict[str, str]
    type: str
    state: str | None = None


class AdminWorkerList(BaseModel):
    """Workers with tokens of their own."""

    workers: list[AdminWorker]


class NewWorkerToken(AdminWorker):
    """What a worker is started with; shown once."""

    token: str = Field(description="Its X-Worker-Token, and its password of the broker")
    redis_url: str = Field(alias="redisUrl", description="Its REDIS_URL, as the gateway reaches the broker")
    warnings: list[str] = Field(description="What its login does not keep out, and what the broker did not write down")


class Steered(BaseModel):
    """What a worker is to be."""

    id: str
    desired: str = Field(examples=["draining"])


class NewUserToken(BaseModel):
    """A token that is to be made."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    role: Literal["viewer", "submitter", "operator", "admin"]
    owner: str | None = Field(None, min_length=1, max_length=200, description="It reads and submits as this owner")
    all_owners: bool = Field(False, alias="allOwners", description="A viewer or submitter that sees all owners' work")
    label: str = Field("", max_length=200, description="What it is for")
    expires_in_seconds: float | None = Field(
        None, alias="expiresInSeconds", gt=0, le=100 * 365 * 86_400, allow_inf_nan=False
    )


class UserToken(Shape):
    """A token of a person."""

    id: str
    role: str
    owner: str | None = None
    label: str | None = None


class NewServed(BaseModel):
    """A model that is to be served, or the number of its replicas."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        min_length=1, max_length=300, description="A shipped preset, an id of the hub, or a path on the workers",
        examples=["Qwen/Qwen3-0.6B"],
    )  # fmt: skip
    name: str | None = Field(None, min_length=1, max_length=200, description="How /v1 calls it; as `model` if unset")
    replicas: int | None = Field(None, ge=1, le=1000, description="1 if unset, or as before")
    embedding: bool = Field(False, description="It makes vectors, in place of chats and texts")
    engine: Literal["auto", "vllm", "transformers"] | None = None
    accelerators: str | None = Field(None, min_length=1, max_length=200, examples=["A100:1"])
    owner: str | None = Field(None, min_length=1, max_length=200, description="It is there for this owner alone")


class ServedReplica(Shape):
    """A task that keeps a model loaded."""

    id: str
    state: str
    worker: str | None = None
    loaded: bool = Field(description="The model is loaded there")


class Served(Shape):
    """A served model."""

    name: str
    model: str
    task_type: str = Field(alias="taskType", examples=["inference"])
    replicas: int = Field(description="How many there are to be")
    loaded: int
    workers: list[str] = Field(description="Where it is loaded")
    owner: str
    tasks: list[ServedReplica]
    error: str = Field(description="Why replicas have failed since one was loaded")


class ServedList(BaseModel):
    """The served models."""

    models: list[Served]


class UserTokenList(BaseModel):
    """Tokens of people."""

    tokens: list[UserToken]


class NewToken(UserToken):
    """A new token; shown once."""

    token: str
