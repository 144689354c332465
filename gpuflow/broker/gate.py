"""What may be popped now: the question that the transport asks before each pop. The worker answers by its admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Gate(Protocol):
    """What may be popped now. Its methods are called on the consumer's thread."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of `queues` that a message may be taken from now, in the order to look."""

    def taken(self, queue: str, tag: str) -> None:
        """A message of `queue` was leased under `tag`."""

    def settled(self, tag: str) -> None:
        """The message of `tag` was acknowledged, put back or lost."""


class OpenGate:
    """A gate that lets every queue pass, for consumers that are not a gpuflow worker."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return all queues."""
        return list(queues)

    def taken(self, queue: str, tag: str) -> None:
        """Do nothing."""

    def settled(self, tag: str) -> None:
        """Do nothing."""
