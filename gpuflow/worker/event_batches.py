"""Celery's task events leave the worker in batches, so that a busy worker does not wait for each of them.

Celery publishes its buffer in every turn of the loop, and the loop waits for the answer before it takes the next task.
"""

from __future__ import annotations

from typing import Any, Final

from vine import promise

#: An event waits for others at most this long, in seconds.
BATCH_SECONDS: Final = 0.05


class EventBatches:
    """Flushes the events of one consumer; put in as the dispatcher's `on_send_buffered`."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._armed = False
        # One object, so that the hub's set of ready callbacks holds it once.
        self._arm_soon = promise(self._arm)

    def install(self) -> None:
        """Take over the flushing of the consumer's dispatcher, which is a new one after each reconnect."""
        dispatcher = self._consumer.event_dispatcher
        if self._consumer.hub is not None and dispatcher is not None:
            dispatcher.on_send_buffered = self

    def __call__(self) -> None:
        """Note that an event waits. Called by any thread."""
        if not self._armed:
            self._consumer.hub.call_soon(self._arm_soon)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._consumer.hub.call_later(BATCH_SECONDS, self.flush)

    def flush(self) -> None:
        """Send what waits. Called on the loop's thread."""
        self._armed = False
        self._consumer._flush_events()
