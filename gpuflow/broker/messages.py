"""Messages and their acknowledgement, through the lease table. Used by the transport alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kombu.transport import virtual

#: Header that carries the `eta` of a message whose delay is the broker's business.
ETA_HEADER: Final = "gpuflow_eta"


class LeaseMessage(virtual.Message):  # type: ignore[misc]
    """A message whose end says nothing of a later delivery.

    A message that was given back may come to the same process again before Celery has acknowledged it the first time.
    """

    def __init__(self, payload: Mapping[str, Any], channel: Any, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self._delivery = channel.leases.delivery(self.delivery_tag)

    @property
    def is_outdated(self) -> bool:
        """Whether this process holds another delivery of the message by now."""
        return self.channel.leases.delivery(self.delivery_tag) not in (None, self._delivery)

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge this delivery."""
        if self.is_outdated:
            self._state = "ACK"
        else:
            super().ack(multiple)

    def reject(self, requeue: bool = False) -> None:
        """Drop this delivery, or put it to the front of its list."""
        if self.is_outdated:
            self._state = "REJECTED"
        else:
            super().reject(requeue)


class LeaseQoS(virtual.QoS):  # type: ignore[misc]
    """Acknowledgement through the lease table; the number of messages that a worker holds is its gate's matter."""

    restore_at_shutdown = True

    def can_consume(self) -> bool:
        """Always true for a gpuflow worker: a full one still serves the control queue. Else by the prefetch count."""
        self.channel.leases.tick()  # the loop goes on, also while nothing is to be taken
        return bool(not self.channel.leases.gate.counts_prefetch or super().can_consume())

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note the message; Redis has its lease already, from the pop."""
        super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """End the lease (with the next pop, or when the server is back); a LOST one is logged and changes nothing."""
        self.channel.acknowledge(delivery_tag)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drop the message, or put it to the front of its list."""
        self.channel.leases.settle_or_defer(delivery_tag, "front" if requeue else "ack")
        self._quick_ack(delivery_tag)

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """On a cut connection or a stop: what has not begun goes back, what runs here keeps its lease."""
        self._on_collect.cancel()
        if not getattr(self._delivered, "restored", None):
            self._delivered.clear()
            self._delivered.restored = True
            if self.channel.consumes:
                self.channel.leases.release_unstarted()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the lease table's own thread sweeps."""
