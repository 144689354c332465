"""Tar headers that a well-meaning program does not write."""

from __future__ import annotations

import tarfile


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % tarfile.BLOCKSIZE)


def header(kind: bytes, content: bytes) -> bytes:
    """Return a header of a kind with its content."""
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, len(content)
    return member.tobuf(tarfile.GNU_FORMAT) + padded(content)


def records(**fields: str) -> bytes:
    """Return pax records."""
    found = b""
    for name, value in fields.items():
        body = f" {name}={value}\n".encode()
        length = len(body)
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        found += str(length).encode() + body
    return found


def endless_number(count: int) -> bytes:
    """Return a pax header of digits: tarfile's search takes a time that grows with the square of their count."""
    return header(tarfile.XHDTYPE, b"1" * count)
