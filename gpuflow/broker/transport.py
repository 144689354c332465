"""kombu's Redis transport with leases: one Lua step to publish, one to pop, one to settle.

Used by every connection of the gpuflow app (see `broker.connection`); no other Celery app of the process is touched.
It knows messages and queues. What may be popped now is the gate's decision (`broker.gate`; here `worker.admission`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from queue import Empty
from typing import Any, ClassVar, Final

import redis
from kombu.transport import redis as stock
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads
from redis.exceptions import NoScriptError, ResponseError

from gpuflow.broker.installed import installed
from gpuflow.broker.keys import Keys
from gpuflow.broker.lease import NEVER, Lease
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.look import FAR_NAMES, FAR_SECONDS, PAGE_NAMES, RESCAN_SECONDS, Look
from gpuflow.broker.merged_calls import CALLER_PRIORITY, control_message, hints_text, is_readable, run_message
from gpuflow.broker.messages import ETA_HEADER, LeaseMessage, LeaseQoS
from gpuflow.broker.priorities import DEFAULT_PRIORITY, PRIORITY_STEPS, SEPARATOR, list_key, list_keys, queue_of
from gpuflow.broker.publication import Publication, held_here
from gpuflow.broker.scripts import broker_script
from gpuflow.broker.signed_messages import signed_call, with_signature
from gpuflow.broker.sweeper import BELL_SECONDS
from gpuflow.logs import get_logger
from gpuflow.routing.affinity import session_of
from gpuflow.signatures import SignatureRefused, Signer, signer_from

log = get_logger("gpuflow.transport")

#: After an answer that a pop is refused, the next one is sent so many seconds later.
REFUSED_SECONDS: Final = 1.0
#: The id in the headers of a message; what else is a text in it has its quotes escaped.
_ID: Final = re.compile(r'"id": "([^"\\]{1,255})"')
#: The queue to which a caller's message goes when its run has ended (`routing.families.CONTROL_QUEUE`).
CONTROL: Final = "gpuflow.control"
#: Header that carries a record to be written with its message; it never reaches the wire.
RECORD_HEADER: Final = "gpuflow_record"


def keeper_timeout_seconds(lease_seconds: float) -> float:
    """Return how long the keeper waits for one answer: a line that is silently dead must not hold it up."""
    return max(0.25, min(3.0, lease_seconds / 20))


def delayed(message: Mapping[str, Any]) -> tuple[dict[str, Any], float | str]:
    """Return the message without its `eta`, and the seconds until then ('' for none: it may be taken at once).

    A delayed message waits in Redis and not in a worker; the sender's clock is compared with itself alone. What was
    asked for is kept in another header, and the task sees it (`self.request.eta`).
    """
    headers = message.get("headers") or {}
    eta = headers.get("eta")
    if not eta:
        return {**message, "headers": {k: v for k, v in headers.items() if k != ETA_HEADER}}, ""
    at = datetime.fromisoformat(eta)
    seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
    return {**message, "headers": {**headers, "eta": None, ETA_HEADER: eta}}, max(0.0, seconds) or ""


class Channel(stock.Channel):  # type: ignore[misc]
    """A Redis channel whose publish, pop and settle are one Lua step each."""

    QoS: ClassVar[type] = LeaseQoS
    Message: ClassVar[type] = LeaseMessage
    from_transport_options = (*stock.Channel.from_transport_options, "lease_seconds", "signing")
    sep = SEPARATOR
    priority_steps = PRIORITY_STEPS
    #: Term of a lease in seconds (a transport option).
    lease_seconds: float = 60.0
    #: What signs messages (a transport option, `signatures.signing_options`).
    signing: Mapping[str, Any] | None = None
    supports_batch_publish = False
    #: Whether something consumes from a queue through this channel.
    consumes = False
    _keeps_leases = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = Keys(self.global_keyprefix)
        self._plain: redis.Redis | None = None
        self._shared: Any = None
        self._own_leases: LeaseTable | None = None
        self._keeper_pool: redis.ConnectionPool | None = None
        self._unacknowledged: set[str] = set()
        self._look = Look()
        #: Whether a pop was sent whose answer has not been read.
        self._pops = False
        #: Messages that are done: the next pop ends their leases.
        self._done: dict[str, Lease] = {}
        self._refused = ""
        self._refused_until = 0.0

    @property
    def leases(self) -> LeaseTable:
        """The lease table of this process, or one of this channel's own outside a worker."""
        table = installed()
        if table is not None:
            return table
        if self._own_leases is None:
            self._own_leases = LeaseTable(self.keys, self.lease_seconds)
        return self._own_leases

    def _connparams(self, asynchronous: bool = False) -> Any:
        """Return how to connect. Raises redis.ConnectionError when the channel is closed: its user opens a new one."""
        if self.connection is None:
            raise redis.ConnectionError("the channel is closed")
        return super()._connparams(asynchronous=asynchronous)

    @cached_property
    def signer(self) -> Signer | None:
        """What signs the messages of tasks; None where nothing is signed. Raises InvalidSettings."""
        return signer_from(self.signing, self.global_keyprefix)

    @property
    def plain_client(self) -> redis.Redis:
        """A client that adds no prefix (our keys carry it) on the channel's ordinary pool."""
        if self._plain is None or self._plain.connection_pool is not self.pool:
            self._plain = redis.Redis(connection_pool=self.pool)
        return self._plain

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Give a client on the channel's ordinary pool: the same one each time, as making one takes a while."""
        if client is None and (self._shared is None or self._shared.connection_pool is not self.pool):
            self._shared = self._create_client()
        yield client or self._shared

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        """Start to consume; the first time, the lease table gets a client that outlives this channel."""
        if no_ack:
            self._unacknowledged.add(queue)
        # The first consumer of a worker's channel may be mingle's, which acknowledges nothing: no keeper for that one.
        first = not self.consumes or (not no_ack and not self._keeps_leases)
        if first and queue not in self._fanout_queues:
            self.consumes = True
            self._keeps_leases = not no_ack
            pool = self._get_pool()
            pool.connection_kwargs["socket_timeout"] = keeper_timeout_seconds(self.leases.lease_seconds)
            self._keeper_pool = pool
            self.leases.connect(redis.Redis(connection_pool=pool), keep=not no_ack)
            self.leases.disown_unknown()
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    # -- publish ------------------------------------------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        headers = message.get("headers") or {}
        record = headers.get(RECORD_HEADER)
        if record is not None:
            message = {**message, "headers": {k: v for k, v in headers.items() if k != RECORD_HEADER}}
        properties = message.get("properties") or {}
        message, delay = delayed(message)
        keys = [
            self.global_keyprefix + list_key(queue, properties.get("priority")),
            self.keys.ready,
            self.keys.delayed,
            self.keys.parked,
        ]
        if record is not None and record["kind"] == "call" and is_readable(message):
            self._join(queue, message, record, keys[0])
            return
        message = self._signed(queue, message, record)
        args: list[Any] = [dumps(message), BELL_SECONDS, delay, properties["delivery_tag"]]
        held = held_here(headers.get("id"))
        if held is not None:
            asked = record or {}
            publication = Publication(
                message=args[0],
                tag=args[3],
                queue=queue,
                list_key=keys[0],
                delay_seconds=float(delay or 0),
                requirement=asked.get("requirement") or "",
                hints=hints_text(asked.get("hints") or {}),
                fields=asked.get("fields") or {},
            )
            held.append(publication)
            return
        if record is not None:
            more_keys, more_args = self._submission(queue, record)
            keys += more_keys
            args += more_args
        broker_script("publish")(self.plain_client, keys, args)

    def _signed(
        self, queue: str, message: Mapping[str, Any], record: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the message of a task signed for the queues in which it may wait; any other one as it is."""
        if self.signer is None or "task" not in (message.get("headers") or {}):
            return dict(message)
        fields = (record or {}).get("fields") or {}
        alternatives = [one["queue"] for one in json.loads(fields.get("alternatives") or "[]")]
        stamped = record is not None and record.get("requirement")
        return with_signature(
            self.signer,
            message,
            list(dict.fromkeys([queue, *alternatives])),
            hints=(record or {}).get("hints") if stamped else None,
            owner=str(fields.get("owner") or "") if record is not None and record["kind"] != "pipeline" else None,
        )

    def _submission(self, queue: str, record: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        record_id = record.get("id", "")
        of_task = record["kind"] != "pipeline"
        keys = [
            self.keys.task(record_id) if of_task else self.keys.pipeline(record_id),
            self.keys.tasks if of_task else self.keys.pipelines,
            self.keys.events(record_id),
            *([self.keys.unfinished] if of_task else []),
        ]
        pairs = [part for item in record.get("fields", {}).items() for part in item]
        return keys, [
            record_id,
            queue,
            record.get("requirement") or "",
            hints_text(record.get("hints") or {}),
            record.get("fallback_seconds", ""),
            *pairs,
        ]

    def _join(self, queue: str, message: Mapping[str, Any], record: Mapping[str, Any], run_list: str) -> None:
        """Publish a call that may be merged: it joins a run, or begins one (join.lua)."""
        call, keys = record["call"], self.keys
        priority = (message.get("properties") or {}).get("priority")
        options = {
            **call["options"],
            "caller": record["id"],
            "queue": queue,
            "requirement": record["requirement"],
            "fallback_seconds": record.get("fallback_seconds", ""),
            "priority": DEFAULT_PRIORITY if priority is None else int(priority),
            "bell": BELL_SECONDS,
        }
        run = self._signed(queue, run_message(message, options["run"], call["kwargs"]), record)
        control = self._signed(CONTROL, control_message(message, CONTROL))
        broker_script("join")(
            self.plain_client,
            [
                run_list,
                keys.ready,
                keys.task(record["id"]),
                keys.events(record["id"]),
                keys.tasks,
                keys.unfinished,
                self.global_keyprefix + list_key(CONTROL, CALLER_PRIORITY),
                keys.merge,
            ],
            [
                json.dumps(options),
                dumps(self._signed(queue, message, record)),
                dumps(run),
                dumps(control),
                hints_text(record.get("hints") or {}),
                call["spec"]
                if self.signer is None
                else signed_call(self.signer, call["options"]["call"], call["spec"]),
                json.dumps(record["fields"]),
                json.dumps(call["fields"]),
            ],
        )

    def _purge(self, queue: str) -> int:
        """Take away what waits in a queue, and what is delayed for it; return how many messages that were."""
        count: int = super()._purge(queue)
        lists = [self.global_keyprefix + key for key in list_keys([queue])]
        delayed = broker_script("purge")(
            self.plain_client, [self.keys.delayed, self.keys.parked, self.keys.ready, *lists], []
        )
        return count + int(delayed)

    def _q_for_pri(self, queue: str, pri: int) -> str:
        """Return kombu's list of a priority step, for sizes and purges."""
        return f"{queue}{self.sep}{pri}" if pri else queue

    def priority(self, n: int) -> int:
        """Return the step as it is: `list_key` has mapped the priority."""
        return n

    # -- pop ----------------------------------------------------------------------------------------------------

    def _brpop_start(self, timeout: float | None = None) -> None:
        self.leases.tick()
        if time.monotonic() < self._refused_until:
            self._acknowledge_all()
            return
        gate, look = self.leases.gate, self._look
        if look.begin(time.monotonic()):
            look.plain = gate.open_queues(self._queue_cycle.consume(len(self.active_queues)))
            look.chosen = gate.choose(look.names_to_choose(), look.barren, look.full) if self._carrier() else []
            look.queues = [*look.plain, *(choice.queue for choice in look.chosen)]
        if not look.queues:
            self._acknowledge_all()
        connection = self.client.connection
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()
        self._pops = bool(look.queues)
        if look.queues:
            look.done, self._done = self._done, {}
            connection.send_command(*self._pop_command())
        else:
            connection.send_command("BLPOP", self.leases.bell, RESCAN_SECONDS)

    def acknowledge(self, tag: str) -> None:
        """End the lease of a message that is done: with the next pop of a worker that is about to send one, or now."""
        sleeps = self._in_poll and not self._pops
        owed = None if sleeps or self.closed or installed() is None else self.leases.owe_ack(tag)
        if owed is None:
            self.leases.settle_or_defer(tag, "ack")
            return
        self._done[tag], has_room = owed
        self._look.has_room |= has_room

    def _acknowledge_all(self) -> None:
        """End at once what would have ended with the next pop."""
        done, self._done = self._done, {}
        for tag in done:
            if not self.leases.settle_or_defer(tag, "ack"):
                return  # the keeper of the leases tells the rest, too, when the server is back

    def _pop_command(self) -> list[Any]:
        keys, leases, look = self.keys, self.leases, self._look
        waits_as = leases.gate.waits_as if self._carrier() else ""
        groups = [*look.plain, *filter(None, (waits_as, waits_as and leases.gate.machine))]
        leases.groups.update(groups)
        lists = _packed_lists(self.global_keyprefix, tuple(look.queues))
        return [
            "EVALSHA",
            broker_script("pop").sha,
            7 + len(lists),
            *(keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, leases.bell),
            *lists,
            leases.owner,
            leases.lease_seconds,
            look.to_json(groups, leases.gate.message_filter, PAGE_NAMES if waits_as else 0),
            *(part for tag, lease in look.done.items() for part in (tag, lease.returned, *(lease.used or ("", "")))),
        ]

    def _meet_server(self) -> None:
        """The server was restarted: let the fleet know before anything can be popped from it."""
        self.leases.sweeper.arrive(self.leases.client)
        broker_script("pop").load(self.leases.client)

    def _brpop_read(self, **options: Any) -> bool:
        look = self._look
        popped = bool(look.queues)
        self._pops = False
        connection = self.client.connection
        reply: Any = None
        try:
            try:
                try:
                    reply = connection.read_response()
                except NoScriptError:
                    self._meet_server()
                    connection.send_command(*self._pop_command())
                    reply = connection.read_response()
            except self.connection_errors:
                connection.disconnect()
                self.leases.gate.chosen_none()
                raise
            except ResponseError as error:
                self._note_refusal(error)
                raise Empty from None
            if self._refused:
                log.warning("can_be_taken_again", after=self._refused)
                self._refused = ""
            if not popped:
                look.woken(reply)
                if look.is_due:
                    self.leases.sweep_soon()
                if look.woken_for is not None:
                    self.leases.gate.woken_for(look.woken_for[1])
                raise Empty
            return self._read_popped(reply)
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()

    def _note_refusal(self, error: ResponseError) -> None:
        """The server took no pop: nothing is asked of it for a moment. No answer ends the consumer loop."""
        self.leases.gate.chosen_none()
        self._refused_until = time.monotonic() + REFUSED_SECONDS
        if str(error) != self._refused:
            self._refused = str(error)
            log.error("nothing_can_be_taken", cause=self._refused)

    def _read_popped(self, reply: Any) -> bool:
        gate, look = self.leases.gate, self._look
        key, raw, names, blocked, tag, returned, lost, (count, where, why) = reply
        if count:
            queue = queue_of(bytes_to_str(where)[len(self.global_keyprefix) :])
            log.error(
                "messages_put_aside", count=count, queue=queue, why=bytes_to_str(why), see="gpuflow dead messages"
            )
        for done, lease in look.done.items():
            self.leases.acknowledged(done, lease, was_lost=done.encode() in lost)
        look.page = [bytes_to_str(name) for name in names]
        key, tag, returned = (bytes_to_str(part) for part in (key, tag, returned))
        delivered = bool(key) and self._deliver_leased(key, raw, tag, returned)
        if not delivered:
            gate.chosen_none()
            look.in_vain(time.monotonic())
        for queue in blocked:
            gate.on_blocked_by_sessions(bytes_to_str(queue))
        if delivered:
            return True
        fitting = gate.fitting(look.page, look.barren)
        if not fitting and len(names) == PAGE_NAMES:
            look.page = self._further()
            fitting = gate.fitting(look.page, look.barren)
        if not fitting or look.refused(fitting):
            look.again_at = time.monotonic() + RESCAN_SECONDS
        raise Empty

    def _further(self) -> list[str]:
        """Return the names of the ready index behind the first page that hold something fitting; seldom needed."""
        look, now = self._look, time.monotonic()
        if now < look.far_at:
            return []
        look.far_at = now + FAR_SECONDS
        start = PAGE_NAMES
        while names := self.leases.client.zrange(self.keys.ready, start, start + FAR_NAMES - 1):
            page = [bytes_to_str(name) for name in names]
            if self.leases.gate.fitting(page, look.barren):
                return page
            start += FAR_NAMES
        return []

    def _deliver_leased(self, key: str, given: bytes, tag: str, returned: str) -> bool:
        """Hand a message over; False when it had to go back for lack of room."""
        queue = queue_of(key[len(self.global_keyprefix) :])
        self._look.found(queue)
        used = None
        try:
            if self.leases.checker is not None and queue not in self._unacknowledged:
                used = self.leases.checker.check(given, queue)
            raw = given.decode()
            message = self._read(raw, tag, returned=returned != NEVER)
        except SignatureRefused as error:
            self.leases.gate.chosen_none()
            self.leases.refuse(tag, _id_in(given), error, given, returned)
            return True
        except redis.RedisError as error:  # whether it was used before is not known
            log.warning("message_not_checked", tag=tag, cause=str(error))
            self.leases.gate.chosen_none()
            self.leases.settle_or_defer(tag, "front")
            return False
        except Exception as error:  # noqa: BLE001  (whatever a message holds, it ends nobody)
            self.leases.gate.chosen_none()
            self.leases.set_aside(tag, _id_in(given), f"{type(error).__name__}: {error}"[:1000], returned)
            return True
        if not self.leases.accept(tag, queue, key, raw, returned, used):
            self.leases.gate.chosen_none()
            return True
        if not self.leases.gate.on_leased(queue, tag, *session_of(raw)):
            self.leases.settle_or_defer(tag, "front")
            return False
        if queue in self._active_queues:
            self._queue_cycle.rotate(queue)
            if queue in self._unacknowledged:
                self.leases.settle(tag, "ack")
            self.connection._deliver(message, queue)
        else:
            self.connection._deliver(message, self._carrier())
        return True

    def _read(self, raw: str, tag: str, *, returned: bool) -> dict[str, Any]:
        """Return a message as kombu takes it. Raises whatever its content leads to."""
        message: dict[str, Any] = loads(raw)
        properties, headers = message["properties"], message["headers"]
        if not isinstance(headers, dict):
            raise TypeError(f"its headers are {type(headers).__name__}, not a mapping")
        if self.Message(message, channel=self).delivery_tag != tag:
            raise ValueError("its delivery tag is not where it should be")
        if returned:
            headers["redelivered"] = True
            properties["delivery_info"]["redelivered"] = True
        return message

    def _carrier(self) -> str:
        """Return a queue whose consumer also gets the messages of demand queues, which no consumer names, or ""."""
        names: list[str] = self.active_queues
        return next((name for name in names if name not in self._unacknowledged), "")

    def close(self) -> None:
        """Close without waiting for a reply that is still to come: a message in it stays leased and is swept."""
        in_poll, self._in_poll = self._in_poll, None
        if in_poll and self._look.queues:
            self._in_poll = in_poll
            self.leases.gate.chosen_none()
        super().close()
        if self._own_leases is not None:
            self._own_leases.close()
            if self._keeper_pool is not None:
                self._keeper_pool.disconnect()


@lru_cache(maxsize=256)
def _packed_lists(prefix: str, queues: tuple[str, ...]) -> list[bytes]:
    """Return the lists of some queues as they are sent: every pop of a busy worker names the same ones."""
    return [(prefix + key).encode() for key in list_keys(list(queues))]


def _id_in(raw: bytes) -> str:
    """Return the task id in the headers of a message that cannot be read otherwise; "" for none."""
    found = _ID.search(raw.decode("utf-8", "replace"))
    return found[1] if found else ""


class Transport(stock.Transport):  # type: ignore[misc]
    """The leased Redis transport."""

    Channel: ClassVar[type] = Channel
    implements = stock.Transport.implements.extend(batch_publish=False)


class SocketTransport(Transport):
    """The same over a Unix socket: the host name is its URL, which the channel reads."""

    can_parse_url = True
