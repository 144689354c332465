"""Images, sound and video in a task: nothing here reads them, so that what asks for them is a mistake. Pure.

Used by `checking`. Without this, a message of several parts would be refused for its form, or read as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow.spec.report import Findings, Path, show

_WHY: Final = "multimodal messages are not supported: models get text alone"
#: Arguments of a model that make it take, or give, what is no text: section, field.
_ARGUMENTS: Final = (("vllm", "enable_mm_embeds"), ("transformers", "mode"))
_VISUAL: Final = "visual"
#: Items whose messages are looked at; what is longer is data that nobody wrote by hand.
_MOST: Final = 1000


def check_multimodal(spec: dict[str, Any], findings: Findings) -> None:
    """Note what of a task is no text, and take out what would be noted again for its form."""
    data = spec.get("data")
    if isinstance(data, dict):
        if data.pop("image_embedding", None) is not None:
            findings.add(("data", "image_embedding"), f"has vectors of images, and {_WHY}")
        for path, kind in _parts(data):
            findings.add(path, f"is {show(kind)}, and {_WHY}")
    model = spec.get("model")
    for section, name in _ARGUMENTS:
        arguments = model.get(section) if isinstance(model, dict) else None
        value = arguments.get(name) if isinstance(arguments, dict) else None
        if value is True or (isinstance(value, str) and value.startswith(_VISUAL)):
            findings.add(("model", section, name), f"is {show(value)}, and {_WHY}")


def _parts(data: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of messages that are no text: path, and the type of the part."""
    for field in ("items", "prompts", "messages"):
        entries = data.get(field)
        for index, entry in enumerate(entries[:_MOST] if isinstance(entries, list) else ()):
            at: Path = ("data", field, index)
            chat = entry.get("messages") if isinstance(entry, Mapping) and "messages" in entry else entry
            at = (*at, "messages") if chat is not entry else at
            messages = list(enumerate(chat)) if isinstance(chat, list) else [(None, chat)]
            for number, message in messages:
                content = message.get("content") if isinstance(message, Mapping) else None
                here = at if number is None else (*at, number)
                for part_at, part in enumerate(content if isinstance(content, list) else ()):
                    kind = part.get("type") if isinstance(part, Mapping) else None
                    if kind not in (None, "text"):
                        yield (*here, "content", part_at, "type"), kind
