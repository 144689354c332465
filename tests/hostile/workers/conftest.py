"""Fixtures of the attacks on workers."""

from tests.fixtures.fleets import fleet

__all__ = ["fleet"]
