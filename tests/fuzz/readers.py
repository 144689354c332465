"""All readers that are fuzzed, and their shares of the inputs."""

from __future__ import annotations

from tests.fuzz.archive_reader import Archive
from tests.fuzz.http_readers import GatewayRequests, HttpAnswers, UploadForm
from tests.fuzz.reader import Reader
from tests.fuzz.spec_readers import JsonTemplate, MergeKeys, References, Texts, YamlTemplate
from tests.fuzz.wire_readers import ChildLines, Messages, Values

READERS: tuple[type[Reader], ...] = (
    YamlTemplate,
    JsonTemplate,
    References,
    MergeKeys,
    Texts,
    ChildLines,
    Messages,
    Values,
    Archive,
    UploadForm,
    GatewayRequests,
    HttpAnswers,
)


def named(name: str) -> type[Reader]:
    """Return a reader by its name, or the beginning of it. Raises LookupError."""
    for reader in READERS:
        if reader.name.lower().startswith(name.lower()):
            return reader
    raise LookupError(f"no reader is named {name!r}; the readers are: {', '.join(one.name for one in READERS)}")
