"""What is fuzzed: a reader takes bytes, and raises what it declares and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

from tests.fuzz.mutation import Mutator


class Reader:
    """One reader with the inputs made for it. `folder` is a place of its own on the disk."""

    #: Its name in the table of figures.
    name: ClassVar[str]
    #: What it may raise: its declared errors.
    declared: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mutator = self.made_of()

    def made_of(self) -> Mutator:
        """Return the mutator over its corpus."""
        raise NotImplementedError

    def make(self, rng: random.Random) -> bytes:
        """Return an input."""
        return self.mutator.content(rng)

    def grown(self, rng: random.Random, size: int) -> bytes:
        """Return an input of about `size` bytes; the same generator gives the same form at each size."""
        return self.mutator.grown(rng, size)

    def read(self, data: bytes) -> str | None:
        """Read an input; return a name for what came of it, where that is told. Raises what is declared."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it has opened."""
