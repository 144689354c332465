"""`data` of a task: one flat model for all types, so that every mistake has a plain path."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from gpuflow.spec.artifact_reference import is_reference, read_reference
from gpuflow.spec.models_types import Digest, Flag, Name, Number, Strict, Text, Whole
from gpuflow.spec.report import one_of, show
from gpuflow.spec.sharding import shard_range

#: Data type -> fields of which one must be there.
SOURCES: Final = {
    "list": ("items", "messages"),
    "prompts": ("prompts",),
    "preferences": ("preferences",),
    "dataset": ("url",),
    "jsonl": ("path", "url", "upload"),
    "csv": ("path", "url", "upload"),
    "parquet": ("path", "url", "upload"),
    "preset": ("name",),
    "graph_template": ("template",),
    "documents": ("path", "url", "upload"),
}


#: Types of data that are files.
FILE_TYPES: Final = frozenset({"jsonl", "csv", "parquet"})


def _rows_or_reference(value: Any) -> Any:
    """Inline rows, or the reference that stands for them where they are large."""
    if is_reference(value):
        read_reference(value)
    elif value is not None and not isinstance(value, list):
        raise PydanticKnownError("list_type")
    return value


#: A list, or a reference to one (`artifact_reference`).
Rows = Annotated[Any, BeforeValidator(_rows_or_reference)]


class EvalFile(Strict):
    """A file of its own for the evaluation, of the same type and with the same columns as the data."""

    path: Name | None = Field(None, description="A path on the worker")
    url: Name | None = Field(None, description="The URL of a file")
    upload: Name | None = Field(None, description="A local file that travels by the artifact store")
    sha256: Digest | None = Field(None, description="SHA-256 of the file at `url`")

    @model_validator(mode="after")
    def _one_place(self) -> EvalFile:
        given = [name for name in ("path", "url", "upload") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of path, url and upload, and has {' and '.join(given) or 'none'}")
        return self


class Shard(Strict):
    """Which part of the rows a task has: part `index` of `count` equal ones, in order. gpuflow sets it.

    `start`, `end` and `total` say that the rows have been cut already.
    """

    index: Whole = Field(ge=0, le=1023)
    count: Whole = Field(ge=1, le=1024)
    start: Whole | None = Field(None, ge=0, le=10**12)
    end: Whole | None = Field(None, ge=0, le=10**12)
    total: Whole | None = Field(None, ge=0, le=10**12)

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Shard:
        if self.index >= self.count:
            raise ValueError(f"is part {self.index} of {self.count}; the parts are counted from 0")
        known = (self.start, self.end, self.total)
        if None in known and known != (None, None, None):
            raise ValueError("has some of start, end and total; give index and count alone")
        if self.total is not None and (self.start, self.end) != shard_range(self.total, self.index, self.count):
            raise ValueError(f"has another range than part {self.index} of {self.count} over {self.total} rows")
        return self


class Column(Strict):
    """One column of a graph template: a label, and a value (usually a reference to another stage)."""

    label: Name = Field(description="Heading of the column")
    value: Any = Field(None, description="Text, list or reference; `node` and `path`, or `expr`, become one")
    node: Name | None = None
    path: Name | None = None
    expr: Name | None = None
    data: dict[str, Any] | None = Field(None, description="{type: list, items: [...]}: values that are written out")
    default: Any = Field(None, description="Where the value is null")


class GraphTemplate(Strict):
    """Prompts made from the results of other stages."""

    name: Name | None = Field(None, description="columns (where it is left out), two_column_briefing, format or text")
    columns: list[Column] | None = Field(None, max_length=1000)
    text: Text | None = Field(None, description="Of a template `text`, with {col0_label}, {col0_value}, ...")
    options: dict[str, Any] | None = Field(
        None, description="intro, closing: lines before and after the columns; of `format`: its steps and messages"
    )


class Data(Strict):
    """Where the inputs of a task come from."""

    type: (
        Literal[
            "list",
            "prompts",
            "preferences",
            "dataset",
            "jsonl",
            "csv",
            "parquet",
            "preset",
            "graph_template",
            "documents",
        ]
        | None
    ) = Field(None, description="Found from the other fields where it is left out")
    items: Rows = Field(None, description="Texts, chat messages or records, in order")
    prompts: Rows = Field(None, description="Prompts, in order")
    messages: Rows = Field(None, description="One chat, or a list of chats")
    preferences: Rows = Field(None, description="Records with prompt, chosen, rejected")
    url: Name | None = Field(None, description="Data set id of the hub, or the URL of a file")
    path: Name | None = Field(None, description="A path on the worker")
    upload: Name | None = Field(None, description="A local file that travels by the artifact store")
    sha256: Digest | None = Field(None, description="SHA-256 of the file at `url`; another content fails the task")
    name: Name | None = Field(None, description="Configuration of the data set, or name of a shipped preset")
    split: Name | None = Field(None, description="Split, as in train[:1%]")
    eval_split: Any = Field(None, description="For evaluation: a share, a split's name, or {path, url or upload}")
    column: Name | None = Field(None, description="The column that holds the input")
    columns: dict[str, Name] | None = Field(
        None, description="Role -> column: prompt, completion, text, messages, chosen, rejected, ..."
    )
    separator: str | None = Field(None, description="Text between prompt and completion")
    shuffle: Flag | None = None
    seed: Whole | None = Field(None, ge=0, le=2**32 - 1, description="Seed of the shuffle")
    include: list[Name] | None = Field(
        None, min_length=1, max_length=1000, description="Patterns of the files of documents: *.md, guides/*.txt"
    )
    max_items: Whole | None = Field(None, ge=1, le=10**9, description="Most records that are used")
    shard: Shard | None = Field(None, description="Which part of the rows; gpuflow sets it")
    revision: Name | None = None
    trust_remote_code: Flag | None = None
    template: GraphTemplate | None = None

    @field_validator("items", "prompts", "preferences", "messages")
    @classmethod
    def _not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not value:
            raise ValueError("is an empty list; give at least one entry")
        for index, item in enumerate(_inline(value)):
            if item is None or item == "":
                raise ValueError(f"[{index}] is empty; give text or a record")
        return value

    @field_validator("prompts")
    @classmethod
    def _prompts_are_text(cls, value: Any) -> Any:
        for index, item in enumerate(_inline(value)):
            if not isinstance(item, str | list) and not is_reference(item):
                raise ValueError(f"[{index}] is {show(item)}; a prompt is text or a list of chat messages")
        return value

    @field_validator("preferences")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        for index, item in enumerate(_inline(value)):
            if is_reference(item):
                continue
            missing = [key for key in ("chosen", "rejected") if not isinstance(item, dict) or key not in item]
            if missing and not (isinstance(item, str) and "${" in item):
                raise ValueError(f"[{index}] lacks {one_of(missing)}; a preference has prompt, chosen and rejected")
        return value

    @field_validator("eval_split")
    @classmethod
    def _share_or_name(cls, value: Any) -> Any:
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        if isinstance(value, dict):
            return EvalFile.model_validate(value).model_dump(exclude_unset=True)
        if value is not None and not is_share and not (isinstance(value, str) and value):
            raise ValueError(
                f"is {show(value)}; give a share such as 0.1, a split's name, or a file as {{upload: ./eval.jsonl}}"
            )
        return value

    @model_validator(mode="after")
    def _has_its_source(self) -> Data:
        if self.type is None:
            raise ValueError(
                "does not say where the data is; give one of items, prompts, preferences, url, path, upload"
            )
        wanted = SOURCES[self.type]
        given = [name for name in wanted if getattr(self, name) is not None]
        if not given:
            raise ValueError(f"type {self.type} needs {one_of(wanted)}")
        if len(given) > 1:
            raise ValueError(f"has {' and '.join(given)}, which contradict each other; keep one of them")
        if self.sha256 is not None and (self.url is None or self.type not in {*FILE_TYPES, "documents"}):
            raise ValueError("has sha256, which is that of a file at url; give url, or leave it out")
        if self.include is not None and self.type != "documents":
            raise ValueError(f"has include, which chooses files of documents, but is of type {self.type}")
        if isinstance(self.eval_split, dict) and self.type not in FILE_TYPES:
            raise ValueError(f"has a file as eval_split, but is of type {self.type}; give a share, or files for both")
        return self


def _inline(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class RewardModel(Strict):
    """What scores the answers in ppo and grpo."""

    identifier: Name | None = Field(None, description="Hub id, path, or name of a reward function")
    type: Literal["sentiment", "model", "function"] | None = None
    revision: Name | None = None
    path: Name | None = Field(None, description="On the worker: a folder, or an archive of one")
    url: Name | None = Field(None, description="Of an archive, such as final_model_archive_url of a reward task")
    headers: dict[Name, Text] | None = None
    trust_remote_code: Flag | None = None
    weight: Number | None = Field(None, ge=-1000, le=1000)
    score: Literal["probability", "margin"] | None = Field(
        None, description="Of a sentiment: how likely it is positive, or its logit less that of the negative class"
    )

    @model_validator(mode="after")
    def _names_something(self) -> RewardModel:
        places = [name for name in ("identifier", "path", "url") if getattr(self, name) is not None]
        if not places and self.type != "sentiment":
            raise ValueError("needs identifier, path or url")
        if len(places) > 1:
            raise ValueError(f"has {' and '.join(places)}, which contradict each other; keep one of them")
        if self.type == "function" and self.identifier is None:
            raise ValueError(f"is a function, which is no {places[0]}; name it by identifier")
        if self.headers is not None and self.url is None:
            raise ValueError("has headers, which are those of a url; give url, or leave them out")
        if self.score is not None and self.type != "sentiment":
            raise ValueError("has score, which is that of a sentiment; give type: sentiment, or leave it out")
        return self


class Generation(Strict):
    """How ppo and grpo sample answers."""

    max_new_tokens: Whole | None = Field(None, ge=1, le=10_000_000)
    min_new_tokens: Whole | None = Field(None, ge=0, le=10_000_000)
    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=-1, le=10_000_000)
    min_p: Number | None = Field(None, ge=0, le=1)
    do_sample: Flag | None = None
    repetition_penalty: Number | None = Field(None, gt=0, le=100)
    num_return_sequences: Whole | None = Field(None, ge=1, le=4096)
