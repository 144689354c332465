"""The leases that this process holds, and the thread that keeps them.

The transport reports here what it popped. The worker puts its admission (`Gate`) in and asks to be told when a lease is
LOST. This file knows tags, owners and time, and of a task its id alone.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import redis
from kombu.exceptions import OperationalError
from kombu.utils.encoding import bytes_to_str
from redis.exceptions import NoScriptError, RedisError

from gpuflow.broker.answers import nobody_writes, passes
from gpuflow.broker.gate import Gate, OpenGate
from gpuflow.broker.keys import Keys
from gpuflow.broker.lease import NEVER, Lease, Reclaim, Used, new_token
from gpuflow.broker.scripts import broker_script
from gpuflow.broker.sweeper import BELL_SECONDS, Sweeper, sweep_gap_seconds
from gpuflow.logs import get_logger
from gpuflow.outages import outage
from gpuflow.signatures import SignatureRefused

log = get_logger("gpuflow.leases")

#: What runs is stopped when its lease could not be renewed for this share of its term. The next look at it is at most
#: a tenth of the term away (a pause and a time-out of the keeper), and killing takes a moment.
GIVE_UP_SHARE: Final = 0.85
#: What the next pop was to end, and none has within so many seconds, the keeper ends.
OWED_SECONDS: Final = 1.0
#: A message that was requeued here and popped again before its earlier delivery is over waits so many seconds.
EARLY_SECONDS: Final = 0.5
#: The keeper's turns are at least so many seconds apart, however many messages are due one after the other.
SHORTEST_PAUSE_SECONDS: Final = 0.01
#: It comes so many seconds after a delayed message is due: just before that would be in vain.
AFTER_DUE_SECONDS: Final = 0.001
#: For so long the end of the keeper is waited for, in seconds: it may wait for an answer.
MOST_CLOSE_SECONDS: Final = 5.0
#: So many tasks are named in a line about all whose leases were lost.
MOST_NAMED: Final = 20
#: So many of the consumers that share GPUs are woken when some are given back.
MOST_WOKEN: Final = 8


class Checker(Protocol):
    """Checks signatures of messages, and is told of those that are refused."""

    def check(self, raw: bytes, queue: str) -> Used | None:
        """Return the signature of a message of a queue. Raises SignatureRefused, redis errors."""

    def refused(self, task_id: str, error: SignatureRefused, raw: bytes) -> None:
        """A message is put aside. Raises redis errors, OperationalError, OSError."""


class LeaseTable:
    """Every lease of this process under one owner token.

    `lease_seconds` is the term. A background thread renews every third of it, as long as the consumer loop and the
    supervisor of the message are alive: both ticked within the last term. What was LOST is told to the callbacks of
    `on_lost`. `member` is the worker's id, by which it reports after a restart of the server.
    """

    def __init__(self, keys: Keys, lease_seconds: float, owner: str | None = None, member: str = "") -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        self.owner = owner or new_token()
        self.member = member
        self.gate: Gate = OpenGate()
        self.reclaim: Reclaim | None = None
        #: Is told of the task of a message that is put aside, and why, before that is done.
        self.on_unreadable: Callable[[str, str], None] | None = None
        #: Checks the signature of each message that is taken; None: nothing is checked.
        self.checker: Checker | None = None
        self.bell = keys.bell(self.owner)
        #: The groups of waiters that the doorbell may be in.
        self.groups: set[str] = set()
        self.sweeper = Sweeper(keys, lease_seconds)
        self._leases: dict[str, Lease] = {}
        #: The tags of deliveries at work: from `start` until `over`, whatever becomes of their leases meanwhile.
        self._at_work: set[str] = set()
        self._deliveries = itertools.count(1)
        self._here = threading.local()
        #: Nothing is waited for any more: the process ends now, and what it has not told is told by the next delivery.
        self.is_stopping = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._client: redis.Redis | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        #: The keeper takes its next turn now.
        self._now = threading.Event()
        self._ticked_at = time.monotonic()
        self._renewed_at = time.monotonic()
        self._unwritable_since: float | None = None
        #: That the consumer loop does not go on has been said.
        self._is_stuck = False
        #: The consumer loop waits for its connection to the broker, and is not stuck.
        self.loop_connects = False
        self._run: str | None = None

    def connect(self, client: redis.Redis, *, keep: bool) -> None:
        """Use `client` (a pool of our own, it outlives channels); with `keep`, start the keeper once."""
        with self._lock:
            self._client = client
            if keep and self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="gpuflow-leases", daemon=True)
                self._thread.start()

    @property
    def client(self) -> redis.Redis:
        """The client of the last channel. Raises RuntimeError before `connect()`."""
        if self._client is None:
            raise RuntimeError("the lease table has no connection yet")
        return self._client

    def tick(self) -> None:
        """Say that the consumer loop is alive."""
        self._ticked_at = time.monotonic()

    @property
    def ticked_at(self) -> float:
        """When the consumer loop last said that it is alive (monotonic seconds); infinite when it has ended."""
        return self._ticked_at

    def consumer_has_ended(self) -> None:
        """Say that nothing more is taken, and that what runs here goes on without the consumer loop."""
        self._ticked_at = math.inf

    def accept(
        self, tag: str, queue: str, key: str = "", raw: str = "", returned: str = NEVER, used: Used | None = None
    ) -> bool:
        """Note a message that the pop script has leased to us: its queue, its list, its text, its last return, and the
        signature that it has used when it is acknowledged.

        False: an earlier delivery of it is still at work here, which holds by the same tag its slot, its GPUs and its
        lease. If that one had lost its lease to a sweep it has it again now; if it is ending, or nobody supervises it
        any more, the message is requeued for a moment later; if it has ended and the server could not be told, the
        server is told now.
        """
        with self._lock:
            earlier = self._leases.get(tag)
            early = tag in self._at_work
            goes_on = early and earlier is not None and not (earlier.requeueing or earlier.owed)
            goes_on = goes_on and self._is_supervised(earlier, time.monotonic())
            owed = earlier.owed if earlier is not None else ""
            if not early:
                number = next(self._deliveries)
                self._leases[tag] = Lease(
                    queue=queue, delivery=number, list_key=key, raw=raw, returned=returned, used=used
                )
            elif earlier is not None and goes_on:
                earlier.returned = returned
        if not early:
            return True
        if goes_on:
            log.warning("lease_taken_back", tag=tag, queue=queue)
            return False
        log.debug("message_came_early", tag=tag, queue=queue, owed=owed)
        try:
            self._ask_to_settle(tag, owed or "front", 0 if owed == "ack" else EARLY_SECONDS, returned, used)
        except RedisError as error:
            log.info("lease_left_to_the_sweep", tag=tag, cause=str(error))
        return False

    def _is_supervised(self, lease: Lease | None, now: float) -> bool:
        """Whether the supervisor of the message has been alive within the last term, or need not be yet."""
        return lease is not None and (lease.beat_at is None or now - lease.beat_at <= self.lease_seconds)

    def start(self, tag: str, on_lost: Callable[[], None] | None = None, *, delivery: int | None = None) -> bool:
        """Note that work on the message begins: a cut connection no longer returns it.

        False if it is not ours, or, with `delivery`, if another delivery of it has come since.
        """
        with self._lock:
            lease = self._leases.get(tag)
            if lease is None or lease.returning or delivery not in (None, lease.delivery):
                return False
            lease.started = True
            self._at_work.add(tag)
            if on_lost is not None:
                lease.on_lost.append(on_lost)
            return True

    def begin(self, tag: str, task: str, attempt: int) -> None:
        """Note which attempt works on the message."""
        with self._lock:
            lease = self._leases.get(tag)
            if lease is not None:
                lease.task, lease.attempt = task, attempt

    def beat(self, tag: str | None, *, over: bool = False) -> None:
        """Say that the supervisor of the message is alive; with `over`, that it need not say so any more."""
        lease = self._leases.get(tag or "")
        if lease is not None:
            lease.beat_at = None if over else time.monotonic()

    def requeueing(self, tag: str) -> None:
        """Note that the server is asked to requeue the message: it can come here again before that is answered."""
        with self._lock:
            lease = self._leases.get(tag)
            if lease is not None:
                lease.requeueing = True

    @property
    def here(self) -> str:
        """The tag of the delivery that this thread works on, "" for none."""
        return str(getattr(self._here, "tag", ""))

    def work_on(self, tag: str) -> None:
        """Note on which delivery this thread works; "" for none."""
        self._here.tag = tag

    def holds(self, tag: str) -> bool:
        """Whether the message is still ours, as far as this process knows."""
        return tag in self._leases

    def delivery(self, tag: str) -> int | None:
        """Return which delivery of the message this process holds, None for none."""
        lease = self._leases.get(tag)
        return lease.delivery if lease is not None else None

    def wait(self, seconds: float) -> None:
        """Wait, but not beyond the end of this process's leases."""
        self._stop.wait(seconds)

    def wake(self, *, machine: bool = False) -> None:
        """Make the consumer look again now (a queue has opened); with `machine`, also those that share its GPUs."""
        pipe = self.client.pipeline()
        self._ring(pipe, self.bell)
        if machine and self.gate.machine:
            pipe.spop(self.keys.waiters(self.gate.machine), MOST_WOKEN)
        _, _, *popped = pipe.execute()
        others = {bytes_to_str(bell) for bell in popped[0] or ()} - {self.bell} if popped else set()
        for bell in others:
            self._ring(pipe, bell)
        if others:
            pipe.execute()

    @staticmethod
    def _ring(pipe: Any, bell: str) -> None:
        pipe.lpush(bell, "")
        pipe.expire(bell, BELL_SECONDS)

    def sweep_soon(self) -> None:
        """Make the keeper sweep now, as a message may be due before it would."""
        self._now.set()

    def held(self) -> dict[str, Lease]:
        """Return a copy of all leases."""
        with self._lock:
            return dict(self._leases)

    def returned(self, tag: str) -> str:
        """Return when the message of a lease had last gone back before this delivery, as the server has it."""
        lease = self._leases.get(tag)
        return lease.returned if lease is not None else NEVER

    def settle(self, tag: str, how: str, delay_seconds: float = 0) -> bool:
        """End a lease: `ack`, `front` or `back` (to be taken again after the delay). False when it was LOST.

        A lease that was lost or settled before is none any more, and the server is not asked. Raises redis errors
        when the server could not be told.
        """
        held = self._leases.get(tag)
        if held is None:
            return False
        return self._settle(tag, held, how, delay_seconds)

    def _settle(self, tag: str, lease: Lease, how: str, delay_seconds: float = 0) -> bool:
        done = self._ask_to_settle(tag, how, delay_seconds, lease.returned, lease.used)
        was_ours = self._drop(tag, lease) is not None
        if was_ours and self.gate.on_lease_ended(tag):
            self.wake()
        if not done and was_ours and not lease.owed:
            log.warning("lease_lost", tag=tag, at=how)
        return bool(done)

    def _ask_to_settle(self, tag: str, how: str, delay_seconds: float, returned: str, used: Used | None) -> Any:
        keys = self.keys
        return broker_script("settle")(
            self.client,
            [keys.leases, keys.unacked, keys.owners, keys.ready, keys.delayed, keys.parked],
            [tag, self.owner, how, BELL_SECONDS, delay_seconds, returned, *(used or ())],
        )

    def settle_or_defer(self, tag: str, how: str) -> bool:
        """End a lease as `settle`; a server that cannot be told now is told when it is back, and this is False."""
        try:
            self.settle(tag, how)
        except RedisError as error:
            with self._lock:
                lease = self._leases.get(tag)
                if lease is not None:
                    lease.owed, lease.owed_at = how, -math.inf
            if lease is not None:
                log.warning("lease_to_be_settled", tag=tag, how=how, cause=str(error))
                self.gate.on_lease_ended(tag)
            return False
        return True

    def owe_ack(self, tag: str) -> tuple[Lease, bool] | None:
        """Note that a message is done, whose lease ends with the next pop of this consumer; None if it is not ours.

        Returns its lease, and whether more may be taken than before. What no pop has `acknowledged` within OWED_SECONDS
        the keeper settles. For the thread of the consumer.
        """
        with self._lock:
            lease = self._leases.get(tag)
            if lease is None:
                return None
            lease.owed, lease.owed_at = "ack", time.monotonic()
        return lease, self.gate.on_lease_ended(tag)

    def acknowledged(self, tag: str, lease: Lease, *, was_lost: bool) -> None:
        """Note that the server has ended the lease of a message that was done, or had lost it before.

        Another delivery of the message may have come since: that one's lease stays.
        """
        if self._drop(tag, lease) is not None and was_lost:
            log.warning("lease_lost", tag=tag, at="ack")

    def set_aside(self, tag: str, task_id: str, why: str, returned: str = NEVER) -> None:
        """Put a message aside that nobody can read or run; its task is told first. Errors leave it to the sweep.

        `returned` is of a delivery that was not taken.
        """
        log.error("message_put_aside", tag=tag, task=task_id, why=why)
        told = self.on_unreadable if task_id else None
        self._put_aside(tag, why, returned, (lambda: told(task_id, why)) if told is not None else None, task_id)

    def refuse(self, tag: str, task_id: str, error: SignatureRefused, raw: bytes, returned: str) -> None:
        """Put a message aside whose signature is refused; it was not taken. Errors leave it to the sweep."""
        checker = self.checker
        if checker is not None:
            self._put_aside(tag, str(error), returned, lambda: checker.refused(task_id, error, raw), task_id)

    def _put_aside(self, tag: str, why: str, returned: str, tell: Callable[[], None] | None, task_id: str) -> None:
        keys = self.keys
        lease = self._leases.get(tag)
        try:
            if tell is not None:
                self._tell(task_id, tell)
            broker_script("set_aside")(
                self.client,
                [keys.leases, keys.unacked, keys.owners, keys.ready],
                [tag, self.owner, why, lease.returned if lease is not None else returned],
            )
        except (RedisError, OperationalError, OSError) as error:
            log.warning("message_left_to_the_sweep", tag=tag, cause=str(error))
        if self._drop(tag) is not None:
            self.gate.on_lease_ended(tag)

    def _tell(self, task_id: str, tell: Callable[[], None]) -> None:
        """Tell the task of a message; what cannot be told to it ever keeps the message from nothing."""
        try:
            tell()
        except Exception as error:
            if passes(error):
                raise
            log.exception("task_not_told", task=task_id)

    def over(self, tag: str) -> None:
        """Note that nothing works any more on the delivery that was started."""
        with self._lock:
            self._at_work.discard(tag)
            lease = self._leases.get(tag)
            if lease is not None:
                lease.over_at = time.monotonic()

    def settle_deferred(self, least_seconds: float = 0.0) -> None:
        """Tell the server of work that has ended, and of which it has not heard for so long. Raises redis errors."""
        now = time.monotonic()
        for tag, lease in self.held().items():
            if not lease.owed and lease.over_at + self.lease_seconds < self._ticked_at < math.inf:
                # Celery's loop drops acknowledgements that wait beside one that fails.
                log.error("lease_never_settled", tag=tag, queue=lease.queue)
                lease.owed = "front"
            if lease.owed and lease.owed_at + least_seconds <= now and self._leases.get(tag) is lease:
                self._settle(tag, lease, lease.owed)

    def release_unstarted(self) -> int:
        """Put every message that nothing works on back to the front; return how many. Errors leave it to the sweep."""
        count = 0
        with self._lock:
            unstarted = [tag for tag, lease in self._leases.items() if not (lease.started or lease.owed)]
            for tag in unstarted:
                self._leases[tag].returning = True
        for tag in unstarted:
            try:
                count += self.settle(tag, "front")
            except RedisError as error:
                log.info("lease_left_to_the_sweep", tag=tag, cause=str(error))
                self.forget(tag)
        return count

    def disown_unknown(self) -> None:
        """Put back what the server has leased to us in an answer that never came. Errors leave it to the sweep.

        For the moment of a (re)connection, when no pop is under way.
        """
        try:
            returned = self._disown(self.client, [self.owner], gone=False)
        except RedisError as error:
            log.info("leases_left_to_the_sweep", cause=str(error))
            return
        if returned:
            log.debug("unknown_leases_returned", count=len(returned))

    def end_former_runs(self, client: redis.Redis, owners: Sequence[str]) -> None:
        """Put back what processes that are gone have leased, by their owner tokens. Errors leave it to the sweep."""
        if not owners:
            return
        try:
            self.sweeper.tell_of_lost(self._disown(client, owners, gone=True))
        except RedisError as error:
            log.info("leases_left_to_the_sweep", cause=str(error))

    def _disown(self, client: redis.Redis, owners: Sequence[str], *, gone: bool) -> Any:
        keys = self.keys
        return broker_script("disown")(
            client,
            [keys.leases, keys.unacked, keys.owners, keys.ready],
            [BELL_SECONDS, int(gone), len(owners), *owners, *self.held()],
        )

    def close(self) -> None:
        """Stop renewing and drop the doorbell."""
        self._stop.set()
        self._now.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=MOST_CLOSE_SECONDS)
        if self._client is not None:
            try:
                self.settle_deferred()
                for group in self.groups:
                    self._client.srem(self.keys.waiters(group), self.bell)
                self._client.delete(self.bell)
            except RedisError:
                log.debug("doorbell_left", bell=self.bell)

    def forget(self, tag: str) -> Lease | None:
        """Note that the lease has ended, by a step of another module or because it was LOST."""
        lease = self._drop(tag)
        if lease is not None:
            self.gate.on_lease_ended(tag)
        return lease

    def _drop(self, tag: str, lease: Lease | None = None) -> Lease | None:
        """Forget the lease of a message, or only that `lease`: another delivery of it may have come since."""
        with self._lock:
            held = self._leases.get(tag)
            return self._leases.pop(tag, None) if lease is None or lease is held else None

    def _lost(self, tag: str) -> Lease | None:
        """End a lease that another may hold by now, and stop what works on it; None for one that was none any more."""
        lease = self.forget(tag)
        if lease is None or lease.owed:
            return None
        for callback in lease.on_lost:
            callback()
        return lease

    def _keep(self) -> None:
        usual = min(1.0, self.lease_seconds / 3)
        pause = 0.0  # The run of the server has to be known before a lease can outlive it.
        next_renewal = due_at = 0.0
        turn_ended = time.monotonic()
        while not self._paused(pause):
            now = time.monotonic()
            if now - turn_ended > pause + self.lease_seconds / 3:
                self._excuse_the_pause(now)
            pause = usual
            try:
                if now + usual > next_renewal:  # the next turn would be too late
                    self._renew()
                    next_renewal = now + self.lease_seconds / 3
                again = self.reaffirm(next_seconds=usual)
                if again is not None:
                    due_at = time.monotonic() + again + AFTER_DUE_SECONDS
                if due_at > now:  # also when this turn came between
                    pause = min(usual, max(SHORTEST_PAUSE_SECONDS, due_at - time.monotonic()))
                self.settle_deferred(OWED_SECONDS)
                self._unwritable_since = None
                outage.over(now)
            except RedisError as error:
                log.warning("leases_not_renewed", cause=str(error), held=len(self._leases))
                self._cannot_renew(error, now)
                next_renewal = 0.0
                pause = min(1.0, self.lease_seconds / 20)
            except Exception:
                log.exception("lease_keeper_stumbled")
            turn_ended = time.monotonic()

    def _paused(self, seconds: float) -> bool:
        """Wait until the next turn; True at the end of this process's leases."""
        self._now.wait(seconds)
        self._now.clear()
        return self._stop.is_set()

    def _cannot_renew(self, error: RedisError, now: float) -> None:
        """Give up what may pass to another worker by now. While nobody can write, nothing can."""
        if not nobody_writes(error):
            self._unwritable_since = None
            self._give_up_expired()
            return
        self._ticked_at = max(self._ticked_at, now)  # the consumer loop may wait for the server, too
        if self._unwritable_since is None:
            self._unwritable_since = now
        elif now - self._unwritable_since > sweep_gap_seconds(self.lease_seconds):
            self._renewed_at = now  # the next sweep gives every lease a term of grace

    def _excuse_the_pause(self, now: float) -> None:
        """This process was stopped, or the machine slept: nobody here could say that he is alive."""
        log.warning("process_was_stopped", held=len(self._leases))
        self._ticked_at = max(self._ticked_at, now)
        for lease in self.held().values():
            if lease.beat_at is not None:
                lease.beat_at = now

    def _renew(self, *, new_run: bool = False) -> None:
        now = time.monotonic()
        if now - self._ticked_at > self.lease_seconds:
            if not self._is_stuck and not self.loop_connects and not outage.lasts:
                self._is_stuck = True
                log.error("consumer_loop_stuck", held=len(self._leases))
            self._give_up_expired()
            return
        self._is_stuck = False
        alive = {tag: lease for tag, lease in self.held().items() if self._is_supervised(lease, now)}
        lost: set[str] = set()
        if alive:
            answer = self._ask_to_renew([self.owner, self.lease_seconds, "" if new_run else self._run or "", *alive])
            if answer is None:
                return  # Another server run: the sweep that follows sees to it.
            taken, free = ({bytes_to_str(tag) for tag in tags} for tags in answer)
            unsure = free | taken if new_run else free
            begun = {tag: alive[tag] for tag in unsure if alive[tag].started and alive[tag].raw}
            kept = self.reclaim(begun, new_run) if self.reclaim is not None and begun else set()
            lost = (taken | free) - kept
            for tag in kept:
                log.warning("lease_taken_back", tag=tag, task=begun[tag].task)
        self._renewed_at = now
        for tag in lost:
            if (lease := self._lost(tag)) is not None:
                log.error("lease_lost", tag=tag, queue=lease.queue, why="another owner holds it, or it was settled")

    def _ask_to_renew(self, values: list[Any]) -> Any:
        names = [self.keys.leases, self.keys.owners, self.keys.sweep]
        script = broker_script("renew")
        try:
            return self.client.evalsha(script.sha, len(names), *names, *values)
        except NoScriptError:
            self.sweeper.arrive(self.client)
            return script(self.client, names, values)

    def _give_up_expired(self) -> None:
        """Stop work before its lease can pass to another worker, with time left to kill what runs."""
        if time.monotonic() - self._renewed_at > self.lease_seconds * GIVE_UP_SHARE:
            begun = [tag for tag, lease in self.held().items() if lease.started and not lease.owed]
            lost = [lease for tag in begun if (lease := self._lost(tag)) is not None]
            if lost:
                tasks = sorted(lease.task or "not begun" for lease in lost)
                log.error(
                    "leases_lost", count=len(lost), tasks=tasks[:MOST_NAMED], why="they could not be renewed in time"
                )

    def reaffirm(self, *, next_seconds: float = 0.0) -> float | None:
        """Find out now whether the server was restarted, and put our leases back if it was. Raises redis errors.

        `next_seconds` and what is returned: see Swept.again_seconds.
        """
        with self._turn:
            swept = self.sweeper.sweep(self.client, next_seconds=next_seconds)
            if swept.run != self._run:
                self._renew(new_run=self._run is not None)
                if self.member:
                    self.client.sadd(self.keys.present, self.member)
                self._run = swept.run
        return swept.again_seconds
