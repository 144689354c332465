"""One try to count a part of a chord and, with the last one, to publish the chord's body.

Celery makes an error of the chord of every error that it meets on the way, ends the chord by it and removes what was
counted. That the broker is away or refuses is no error of the chord: here it leaves by a way that no `except Exception`
of Celery takes, nothing more is sent in this try, and whoever made it makes another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import NoScriptError, RedisError

from gpuflow.broker.answers import passes


class Unanswered(BaseException):
    """The broker did not take a step of a join."""


class Joining:
    """A try. `cause` is the error that ended it; `is_sent` from the moment at which the body is published."""

    def __init__(self) -> None:
        self.cause: Exception | None = None
        self.is_sent = False

    def ask(self, step: Callable[[], Any]) -> Any:
        """Take a step. Raises Unanswered, and from then on at once, for an error that passes; others as they are."""
        if self.cause is not None:
            raise Unanswered
        try:
            return step()
        except NoScriptError:
            raise  # the caller loads its script and asks again
        except RedisError as error:
            self.refuse(error)
            raise

    def refuse(self, error: Exception) -> None:
        """Raise Unanswered for an error that passes, and end the try."""
        if passes(error):
            self.cause = self.cause or error
            raise Unanswered from error

    def client(self, plain: redis.Redis) -> redis.Redis:
        """Return a client on the connections of `plain` whose commands are steps of this try."""
        return _Client(plain, self)


_here = threading.local()


def joining_here() -> Joining | None:
    """Return the try that this thread makes now."""
    return getattr(_here, "join", None)


@contextmanager
def joining() -> Iterator[Joining]:
    """Make a try; within another one, be part of that. Raises the error that ended it."""
    outer = joining_here()
    if outer is not None:
        yield outer
        return
    _here.join = join = Joining()
    try:
        yield join
    except Unanswered:
        pass
    finally:
        _here.join = None
    if join.cause is not None:
        raise join.cause


class _Client(redis.Redis):
    def __init__(self, plain: redis.Redis, join: Joining) -> None:
        super().__init__(connection_pool=plain.connection_pool)
        self._join = join

    def execute_command(self, *args: Any, **options: Any) -> Any:
        send: Any = super().execute_command
        return self._join.ask(lambda: send(*args, **options))

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:
        made = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.join = self._join
        return made


class _Pipeline(Pipeline):
    join: Joining

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        send = super().execute
        answers: list[Any] = self.join.ask(lambda: send(raise_on_error))
        return answers
