"""Keeps requests with adapters and those without out of one batch, where the engine cannot keep them apart itself.

vLLM's LoRA on a CPU takes "no adapter" (-1) for the index of the last one: in a mixed batch, a request without an
adapter would be answered with another's. On GPUs it tells them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Sides:
    """Two sides, one of them inside at a time. Who is inside takes in no more of its side once the other waits."""

    def __init__(self) -> None:
        self._inside = [0, 0]
        self._waiting: tuple[list[asyncio.Future[None]], list[asyncio.Future[None]]] = ([], [])

    @contextlib.asynccontextmanager
    async def on(self, side: bool) -> AsyncIterator[None]:
        """Be inside on one side as long as the block runs."""
        mine, other = int(side), int(not side)
        if self._inside[other] or self._waiting[other]:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[mine].append(turn)
            try:
                await turn  # whoever ends it counts us as inside
            except asyncio.CancelledError:
                if turn in self._waiting[mine]:
                    self._waiting[mine].remove(turn)
                elif not turn.cancelled():
                    self._leave(mine, other)
                if not self._waiting[mine]:
                    self._let_in(other)  # they waited for us alone
                raise
        else:
            self._inside[mine] += 1
        try:
            yield
        finally:
            self._leave(mine, other)

    def _leave(self, mine: int, other: int) -> None:
        self._inside[mine] -= 1
        if not any(self._inside):
            self._let_in(other if self._waiting[other] else mine)

    def _let_in(self, side: int) -> None:
        """Let all in who wait on a side, if nobody is on the other one."""
        if self._inside[1 - side]:
            return
        waiting = [turn for turn in self._waiting[side] if not turn.done()]
        self._waiting[side].clear()
        self._inside[side] += len(waiting)
        for turn in waiting:
            turn.set_result(None)
