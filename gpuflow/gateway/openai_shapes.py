"""What OpenAI's clients send to `/v1`, and what a task makes of it.

Fields that change an answer and that no engine here has are refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

#: How a prompt of /v1/completions is rendered: as it is.
_AS_IT_IS: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
#: Interactive calls go before batch work, whose default is 5.
PRIORITY: Final = 7
_Text = Annotated[str, Field(max_length=4_000_000)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Call(BaseModel):
    """What calls of every kind have."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=300, description="A name of GET /v1/models")
    user: str | None = Field(None, max_length=1000, description="Not used")
    priority: int = Field(PRIORITY, ge=0, le=9, description="0 to 9; batch work has 5")


class Sampled(Call):
    """What calls that generate text have."""

    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, le=2**32 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool = False
    stream_options: StreamOptions | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the section `inference` of the task."""
        names = ("max_tokens", "temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) not in (None, 0.0)}
        if self.temperature == 0:
            found["temperature"] = 0
        if self.seed is not None:
            found["seed"] = self.seed
        if self.stop:
            found["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return {**found, "stream": True} if self.stream else found


class Part(BaseModel):
    """A piece of a message; text alone."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: _Text


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | Annotated[list[Part], Field(min_length=1, max_length=1000)]
    name: str | None = Field(None, max_length=200, description="Not used")

    def plain(self) -> dict[str, str]:
        """Return the message as a task has it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)

    def spec(self) -> dict[str, Any]:
        """Return what of the task this call says."""
        inference = self.sampling()
        if self.max_completion_tokens is not None:
            inference["max_tokens"] = self.max_completion_tokens
        items = [{"messages": [message.plain() for message in self.messages]}]
        return {"taskType": "inference", "data": {"type": "list", "items": items}, "inference": inference}


class Completion(Sampled):
    """POST /v1/completions."""

    prompt: _Text | Annotated[list[_Text], Field(min_length=1, max_length=256)]

    def spec(self) -> dict[str, Any]:
        """Return what of the task this call says; prompts go to the model as they are."""
        inference = {**self.sampling(), "chat_template": _AS_IT_IS}
        inference.setdefault("max_tokens", 16)  # OpenAI's default
        items = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return {"taskType": "inference", "data": {"type": "list", "items": items}, "inference": inference}


class Embeddings(Call):
    """POST /v1/embeddings."""

    input: _Text | Annotated[list[_Text], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"

    @field_validator("input")
    @classmethod
    def _holds_text(cls, value: str | list[str]) -> str | list[str]:
        if not all([value] if isinstance(value, str) else value):
            raise ValueError("holds an empty text; leave it out")
        return value

    def spec(self) -> dict[str, Any]:
        """Return what of the task this call says."""
        items = [self.input] if isinstance(self.input, str) else self.input
        return {"taskType": "embedding", "data": {"type": "list", "items": items}}
