"""What may be popped now: the question that the transport asks before each pop. The worker answers by its admission."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

#: No limit to the time limit of a task.
ANY_TIME: Final = -1.0


@dataclass(frozen=True, kw_only=True)
class SelectedQueue:
    """A queue to take from now; with `most_seconds`, a task alone whose time limit is no longer.

    `with_gpus` says whether its tasks get GPUs; with `warm_only`, tasks alone that a warm session here can answer. If
    sessions that answer no more would make room for its other tasks (`yields`), those wait for a bounded time only.
    """

    queue: str
    most_seconds: float = ANY_TIME
    with_gpus: bool = False
    warm_only: bool = False
    yields: bool = False


@dataclass(frozen=True, kw_only=True)
class MessageFilter:
    """Which messages of a queue a consumer takes.

    Of `types` alone (`routing.offers`), of `gpu_types` from queues whose tasks get GPUs; None for `types`: all of
    gpuflow's own, and those of users in `user_types`; None for `gpu_types`: as `types`. None that asks
    for another secret than those in `secrets` (None: any). None that the sessions in
    `full` alone could answer here. Of its `sessions` (those with a place) and `models` before others; a message whose
    model another worker has is left to that one for `patience_seconds`. `here` are all its sessions: what they answer
    sooner or later need not be made room for. `kept` are those that a replica of a served model keeps loaded, with
    whether they have GPUs: a second replica of one is left to other workers, for a time where there are GPUs.
    """

    types: tuple[str, ...] | None = None
    gpu_types: tuple[str, ...] | None = None
    user_types: tuple[str, ...] = ()
    secrets: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    kept: Mapping[str, bool] = field(default_factory=dict)
    patience_seconds: float = 0.0


class Gate(Protocol):
    """What may be popped now. Its methods are called on the consumer's thread."""

    @property
    def waits_as(self) -> str:
        """The class by which this consumer waits for demand queues; "" for one that takes nothing from them now."""

    @property
    def machine(self) -> str:
        """The group of the consumers that share GPUs with this one: what it gives back they may take; "" for none."""

    @property
    def message_filter(self) -> MessageFilter:
        """Which messages it takes."""

    @property
    def counts_prefetch(self) -> bool:
        """Whether Celery's prefetch count says how many messages are held; else the gate does."""

    def woken_for(self, queue: str) -> None:
        """A message was published to the demand queue: let the fleet know whether such messages can be taken here."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of `queues` (consumed by name) that a message may be taken from now."""

    def fitting(self, ready: Sequence[str], barren: Collection[str] = ()) -> list[str]:
        """Return those demand queues of `ready`, but for `barren`, whose next message would fit now, in order."""

    def choose(
        self, ready: Sequence[str], barren: Collection[str] = (), full: Collection[str] = ()
    ) -> list[SelectedQueue]:
        """Return a few of the fitting queues, and hold what any one message of them needs until `chosen_none`.

        What is `full` is not chosen for warm sessions alone.
        """

    def chosen_none(self) -> None:
        """Nothing was taken after `choose`."""

    def on_blocked_by_sessions(self, queue: str) -> None:
        """A message of `queue` was left where it is, as only a warm session could have taken it: make room for it."""

    def on_leased(self, queue: str, tag: str, session: str = "", asked: str = "") -> bool:
        """A message of `queue` was leased under `tag`: it gets a place in a session, or what `choose` has held for it.

        `session` is the name of the sessions that can answer it, "" for none, `asked` what it asks to be run by
        (`routing.offers`). False: there is no room for it any more, and it goes back to the front of its queue.
        """

    def on_lease_ended(self, tag: str) -> bool:
        """The message of `tag` was acknowledged, put back or lost; say whether more may be taken than before."""


class OpenGate:
    """A gate that lets every queue pass, for consumers that are not a gpuflow worker."""

    waits_as = ""
    machine = ""
    message_filter = MessageFilter()
    counts_prefetch = True

    def woken_for(self, queue: str) -> None:
        """Do nothing."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return all queues."""
        return list(queues)

    def fitting(self, ready: Sequence[str], barren: Collection[str] = ()) -> list[str]:
        """Return none: such a consumer names the queues that it consumes."""
        return []

    def choose(
        self, ready: Sequence[str], barren: Collection[str] = (), full: Collection[str] = ()
    ) -> list[SelectedQueue]:
        """Return none."""
        return []

    def chosen_none(self) -> None:
        """Do nothing."""

    def on_blocked_by_sessions(self, queue: str) -> None:
        """Do nothing."""

    def on_leased(self, queue: str, tag: str, session: str = "", asked: str = "") -> bool:
        """Let it in."""
        return True

    def on_lease_ended(self, tag: str) -> bool:
        """Nothing was closed."""
        return False
