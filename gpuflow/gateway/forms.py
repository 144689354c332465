"""Reads a form with files (multipart/form-data, RFC 7578) as it comes in: one file after the other, in constant memory.

Called by the results routes, for clients that send `-F file=@model.tar.gz`. It knows no disk; fields that are no files
are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gpuflow.gateway.problems import Problem

_MEDIA_TYPE: Final = b"multipart/form-data"
_MOST_HEADER_BYTES: Final = 16_384


def is_form(headers: Mapping[str, str]) -> bool:
    """Whether the body of a request is a form with files."""
    return parse_options_header(headers.get("content-type", ""))[0] == _MEDIA_TYPE


@dataclass(frozen=True)
class _Begin:
    """A part begins: its Content-Disposition."""

    disposition: bytes


class _End:
    """A part ends."""


class Form:
    """The body of a request. First `next_file`, then all of `body`, then `next_file` again."""

    def __init__(self, headers: Mapping[str, str], stream: AsyncIterator[bytes]) -> None:
        boundary = parse_options_header(headers["content-type"])[1].get(b"boundary")
        if not boundary:
            raise _broken("it names no boundary")
        self._stream = stream
        self._events: deque[_Begin | bytes | _End] = deque()
        self._over = False
        self._header = [b"", b""]
        self._disposition = b""
        self._header_bytes = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begun,
                    "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
                    "on_header_end": self._header_ended,
                    "on_headers_finished": lambda: self._events.append(_Begin(self._disposition)),
                    "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                    "on_part_end": lambda: self._events.append(_End()),
                    "on_end": self._ended,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    async def next_file(self) -> str | None:
        """Return the file name of the next file, None at the end of the form. Raises Problem 400."""
        while (event := await self._next()) is not None:
            if isinstance(event, _Begin):
                options = parse_options_header(event.disposition)[1]
                if b"filename" in options:
                    return _text(options[b"filename"])
        return None

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file that `next_file` named. Raises Problem 400 where the form is cut."""
        while not isinstance(event := await self._next(), _End):
            if event is None:
                raise _broken("it ends in the midst of a file")
            if isinstance(event, bytes):
                yield event

    async def _next(self) -> _Begin | bytes | _End | None:
        while not self._events and not self._over:
            try:
                chunk = await anext(self._stream)
            except StopAsyncIteration:
                raise _broken("its end is missing") from None
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _broken(str(error)) from None
        return self._events.popleft() if self._events else None

    def _begun(self) -> None:
        self._header, self._disposition, self._header_bytes = [b"", b""], b"", 0

    def _add(self, place: int, piece: bytes) -> None:
        self._header_bytes += len(piece)
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise _broken(f"a part has more than {_MOST_HEADER_BYTES} bytes of headers")
        self._header[place] += piece

    def _header_ended(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _ended(self) -> None:
        self._over = True


def _text(name: bytes) -> str:
    """Return a file name; browsers and curl write a quotation mark in it as %22."""
    try:
        return name.decode("utf-8").replace("%22", '"')
    except UnicodeDecodeError:
        raise Problem(400, "bad-name", "a file name of the form is not UTF-8; encode names as UTF-8") from None


def _broken(cause: str) -> Problem:
    return Problem(
        400,
        "bad-form",
        f"the form cannot be read: {cause}; send `-F file=@name`, or the bytes alone to .../files/<name>",
    )
