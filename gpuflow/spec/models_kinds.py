"""The sections of single task types: model and adapters, checkpoint, rag, echo, command, container, output."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gpuflow.spec.models_data import Data
from gpuflow.spec.models_types import (
    ArgumentChoice,
    ArgumentName,
    ContainerMount,
    Digest,
    EnvName,
    Flag,
    FunctionName,
    ImageName,
    Memory,
    MetricPattern,
    Name,
    Number,
    RelativePath,
    ShellChoice,
    Strict,
    Text,
    TextOrList,
    Whole,
)
from gpuflow.spec.pip_requirements import read_requirement
from gpuflow.spec.report import show


class ModelSource(Strict):
    """Where a model comes from."""

    type: Literal["huggingface", "local", "preset"] | None = None
    identifier: Name = Field(description="Hub id, path on the worker, or name of a shipped preset")
    revision: Name | None = None
    subfolder: Name | None = None
    gguf_file: Name | None = None
    trust_remote_code: Flag | None = None


class Adapter(Strict):
    """A LoRA adapter on top of the model."""

    type: Literal["lora"] = "lora"
    url: Name | None = None
    path: Name | None = None
    name: Name | None = None
    weight: Number | None = Field(None, ge=-100, le=100)

    @model_validator(mode="after")
    def _one_place(self) -> Adapter:
        if (self.url is None) == (self.path is None):
            raise ValueError("needs url or path, one of them")
        return self


class Model(Strict):
    """The model of a task. `vllm` is checked against vLLM's EngineArgs; `transformers` goes to from_pretrained."""

    source: ModelSource | None = None
    adapters: list[Adapter] | None = Field(None, max_length=100)
    vllm: dict[str, Any] | None = None
    transformers: dict[str, Any] | None = None


class Load(Strict):
    """Weights to begin from."""

    type: Literal["http", "path", "local", "s3"] | None = None
    url: Name | None = None
    path: Name | None = None
    headers: dict[Name, Text] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Load:
        if (self.url is None) == (self.path is None):
            raise ValueError("needs url or path, one of them")
        return self


class Checkpoint(Strict):
    """What a task begins from, instead of the model's own weights."""

    load: Load
    merge_first: Flag | None = Field(
        None, description="Of a training that begins from an adapter: merge it into the weights, do not train it on"
    )


class Qdrant(Strict):
    """A Qdrant collection."""

    url: Name = Field(description="Of the HTTP interface: http://host:6333")
    api_key: Text | None = None
    collection: Name
    timeout: Whole | None = Field(None, ge=1, le=86400, description="Seconds")
    vector: Name | None = Field(None, description="Name of the vectors, where a collection has several kinds")
    text_field: Name | None = Field(None, description="Field of a payload that holds the text of a passage")

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://", "${")):
            raise ValueError("is no URL of a server; give http://host:6333 or https://host:6333")
        return value


class Embedding(Strict):
    """How vectors are made. `model` is for rag; for embedding it is another way to write model.source."""

    model: Name | None = None
    normalize: Flag | None = None
    batch_size: Whole | None = Field(None, ge=1, le=65536)
    query_prefix: str | None = Field(None, max_length=1000, description="Put before each question")
    passage_prefix: str | None = Field(None, max_length=1000, description="Put before each passage of an index")


class Chunks(Strict):
    """How documents are cut into passages."""

    unit: Literal["tokens", "characters"] | None = Field(None, description="tokens (of the embedding model) if unset")
    size: Whole | None = Field(None, ge=8, le=100_000, description="Longest passage")
    overlap: Whole | None = Field(None, ge=0, le=50_000, description="How much of a passage the next one repeats")

    @model_validator(mode="after")
    def _overlap_fits(self) -> Chunks:
        if self.size is not None and self.overlap is not None and self.overlap > self.size // 2:
            raise ValueError(f"has overlap {self.overlap}; it must be at most half of size ({self.size})")
        return self


class Index(Strict):
    """What a rag task with it makes of the documents of its data."""

    chunks: Chunks | None = None


class Search(Strict):
    """How rag looks for passages."""

    top_k: Whole | None = Field(None, ge=1, le=10_000)
    score_threshold: Number | None = Field(None, ge=-1e6, le=1e6)
    index: Load | None = Field(None, description="final_index of another rag task: a folder or its archive")
    documents: Data | None = Field(None, description="Documents to make an index of, for this task alone")
    chunks: Chunks | None = Field(None, description="How those documents are cut")
    context_characters: Whole | None = Field(
        None, ge=1, le=100_000_000, description="Most characters of passages in one prompt"
    )


class EchoFailure(Strict):
    """The failure that an echo task ends with."""

    type: Name = "EchoFailure"
    message: str = "asked to fail"
    retryable: Flag = False
    attempts: Whole | None = Field(None, ge=1, le=1000, description="Fail only in the first so many attempts")
    unless_exists: Name | None = Field(None, description="Do not fail where this path exists on the worker")


class Echo(Strict):
    """A task that does what it is told: for tests, demos and checks of a fleet."""

    message: Any = Field(None, description="Given back in the result")
    output: Any = Field(None, description="Any JSON, merged into the result")
    sleep_seconds: Number | None = Field(None, ge=0, le=31_536_000)
    until_exists: Name | None = Field(None, description="Work until this path exists on the worker, then go on")
    steps: Whole | None = Field(None, ge=0, le=1_000_000, description="Progress events, spread over the sleep")
    fail: EchoFailure | None = None
    exit_code: Whole | None = Field(None, ge=0, le=255, description="Exit with this code")
    children: Whole | None = Field(None, ge=0, le=64, description="Grandchildren to start")
    ignore_sigterm: Flag | None = None
    ignore_notice: Flag | None = Field(None, description="Do nothing on a notice (SIGUSR1)")
    checkpoint_steps: Whole | None = Field(
        None, ge=1, le=1_000_000, description="A checkpoint every so many steps and on a notice; resumed from later"
    )
    stdout_garbage: Flag | None = None
    silent: Flag | None = Field(None, description="End without a finish event")
    artifact: RelativePath | None = Field(None, description="Write a file of this name")
    artifact_bytes: Whole | None = Field(None, ge=0, le=2**40)
    memory_mib: Whole | None = Field(None, ge=0, le=2**24, description="Memory to hold while running, in MiB")
    report_env: list[Name] | None = Field(None, description="Environment variables to give back in the result")
    stderr: str | None = Field(None, description="Written to the log")


class Command(Strict):
    """A command of the user's."""

    command: TextOrList = Field(description="A line for the shell, or a list of arguments")
    project: Name | None = Field(None, description="A local folder that travels by the artifact store")
    upload: Name | None = Field(None, description="A local file that travels by the artifact store")
    url: Name | None = Field(None, description="A script, or an archive that is unpacked, to run in a copy of")
    sha256: Digest | None = Field(None, description="Of what url names")
    path: Name | None = Field(None, description="Working folder on the worker, an absolute path")
    requirements: list[Name] | None = Field(
        None, min_length=1, max_length=1000, description="pip requirements; an environment is made of them once"
    )
    python: Name | None = Field(None, description="Interpreter to make that environment with: a path or a name")
    shell: ShellChoice | None = Field(None, description="Whether a shell runs it, or the path of one; a line: true")
    metrics: dict[Name, MetricPattern] | None = Field(
        None, max_length=100, description="Name -> regular expression whose first group is the number"
    )

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("/", "~/", "${")):
            raise ValueError(f"is {show(value)}; give an absolute path of the worker")
        return value

    @field_validator("requirements")
    @classmethod
    def _are_requirements(cls, value: list[str] | None) -> list[str] | None:
        for index, one in enumerate(value or ()):
            if "${" in one:  # read again when it has its value
                continue
            try:
                read_requirement(one)
            except ValueError as error:
                raise ValueError(f"[{index}] {show(one)} {error}") from error
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Command:
        places = [name for name in ("project", "upload", "url", "path") if getattr(self, name) is not None]
        if len(places) > 1:
            raise ValueError(f"has {' and '.join(places)}, which contradict each other; keep one of them")
        if self.sha256 is not None and self.url is None:
            raise ValueError("has sha256 without url; give the url that it belongs to")
        known = [read_requirement(one) for one in self.requirements or () if "${" not in one]
        if any(one.is_relative for one in known) and self.project is None and self.url is None:
            raise ValueError("has a file of a project among its requirements, but no project; give an absolute path")
        if self.python is not None and self.requirements is None:
            raise ValueError("has python without requirements; name the interpreter in the command itself")
        return self


class Container(Strict):
    """A container to run. With a preset, the other fields stand in place of the preset's, or are added to them."""

    image: ImageName | None = Field(None, description="Image, with tag or digest")
    preset: Name | None = Field(None, description="A container preset, shipped or of the worker")
    command: TextOrList | None = None
    entrypoint: TextOrList | None = None
    env_vars: dict[EnvName, Text] | None = None
    workdir: Name | None = Field(None, pattern="^/", description="Working folder in the container")
    mounts: list[ContainerMount] | None = Field(
        None, max_length=100, description="/path/on/the/worker:/path/in/the/container, read-only"
    )
    network: Literal["none", "bridge"] | None = None
    shm_size: Memory | None = Field(None, description="Shared memory, such as 8Gi")
    metrics: dict[Name, MetricPattern] | None = Field(
        None, max_length=100, description="Name -> regular expression whose first group is the number"
    )
    request: Any = Field(None, description="What a preset with `mode: session` is asked: any JSON but null")

    @model_validator(mode="after")
    def _has_an_image(self) -> Container:
        if (self.image is None) == (self.preset is None):
            raise ValueError("needs image or preset, one of them")
        if self.request is not None and self.preset is None:
            raise ValueError("has a request, which only a preset with `mode: session` answers; name one by preset")
        return self


class Function(Strict):
    """A function of a team, which workers have that were started with its module (--include)."""

    name: FunctionName = Field(description="Of its Celery task, such as my_team.jobs.embed")
    args: list[Any] | None = Field(None, max_length=1000)
    kwargs: dict[ArgumentName, Any] | None = Field(None, max_length=1000)
    rows: ArgumentChoice | None = Field(
        None, description="The argument whose list is split: its name, or its place in args"
    )


class Destination(Strict):
    """Where results are copied to, besides the results folder."""

    type: Literal["local", "http", "s3", "callback"] = Field(
        description="callback: the result is sent to `url` once the task has succeeded"
    )
    url: Name | None = None
    method: Literal["POST", "PUT", "post", "put"] | None = Field(None, description="Of a callback; POST if unset")
    headers: dict[Name, Text] | None = None
    path: Name | None = None
    timeoutSec: Number | None = Field(  # noqa: N815
        None, gt=0, le=604_800, description="Seconds that a callback may take, at most 60"
    )
    retries: Whole | None = Field(None, ge=0, le=10, description="Further tries of a callback; 5 if unset")
    secret: Text | None = Field(None, description="Key that a callback is signed with: ${env:NAME} of a secret")


class JsonlExport(Strict):
    """A file with one JSON object for each item of the result."""

    path: RelativePath
    fields: dict[Name, Any] = Field(
        min_length=1, max_length=1000, description="Field -> prompt, output, metadata.x, item.x, or a fixed value"
    )
    required_fields: list[Name] | None = Field(None, max_length=1000, description="Fields that no line may lack")


class Postprocess(Strict):
    """What is made of a result once it is there."""

    jsonl_export: JsonlExport | None = None


class Output(Strict):
    """What a task leaves behind, and where."""

    destination: Destination | None = None
    artifacts: list[RelativePath] | None = Field(None, max_length=1000)
    aliases: dict[RelativePath, RelativePath] | None = Field(
        None, max_length=20, description="Further names of artifacts: name -> the file that it is a copy of"
    )
