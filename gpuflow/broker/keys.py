"""The name of every Redis key that gpuflow writes. Anyone may import this; it holds no logic.

| key | type | what |
|---|---|---|
| `<queue>`, `<queue>\\x06\\x16<p>` | list | waiting messages of one priority, in kombu's layout (`broker.priorities`) |
| `gpuflow.unacked` | hash | delivery tag -> the message as it was popped |
| `gpuflow.leases` | zset | delivery tag -> when the lease ends (Unix seconds on the server's clock) |
| `gpuflow.owners` | hash | delivery tag -> `<owner token>\\n<list key it came from>` |
| `gpuflow.ready` | zset | demand queue with waiting messages -> order of its best head: priority, then time |
| `gpuflow.fallbacks` | zset | task id -> when it moves on to its next alternative, if it waits then |
| `gpuflow.classes` | set | classes of workers: those that serve the same demand queues alike |
| `gpuflow.waiters:<group>` | set | doorbells of those that wait for a plain queue, of one class, or of one machine |
| `gpuflow.warm:<model>` | string | a worker that has the model; expires when none says so |
| `gpuflow.reserved:<tag>` | string | the machine that is reserved for a message; expires when it is not renewed |
| `gpuflow.bell:<owner>` | list | one doorbell; a push wakes its consumer |
| `gpuflow.unreadable` | list | messages that nobody could read or run: JSON of `at`, `list`, `why`, `message` |
| `gpuflow.avoided` | zset | delivery tag, newline, worker that failed with it -> until when others are to take it |
| `gpuflow.returned` | zset | delivery tag of a message that went back undone -> when last |
| `gpuflow.sent:<tag>` | string | a message without a record was published; expires after a minute |
| `gpuflow.sent:replaced:<tag>` | string | what replaced the task of a message was published; expires as a record |
| `gpuflow.used:<signature>` | string | a signed message was acknowledged; expires with its signature |
| `gpuflow.delayed` | zset | delivery tag -> when the message may be taken (Unix seconds on the server's clock) |
| `gpuflow.parked` | hash | delivery tag -> `<front or back>\\n<list key>\\n<message>` of a delayed message |
| `gpuflow.sweep` | hash | `at` of the last sweep, `more` was left, next `alarm`; `run` of the server; `hold` until |
| `gpuflow.present` | set | workers that have said what they hold since the server was restarted |
| `task:<id>` | hash | the task record (see `ledger.records`) |
| `task:<id>:attempts` | hash | attempt number -> JSON of how it went (see `ledger.records`) |
| `celery-task-meta-<id>` | string | Celery's result entry |
| `gpuflow.dead` | zset | task id -> when it died (dead letters) |
| `gpuflow.repairs` | hash | kind of repair -> how often the reconciler made it |
| `gpuflow.metrics` | hash | counts of tasks and attempts (`metrics.counters`); `reconciled_at` |
| `gpuflow.tasks` | zset | task id -> when it was submitted |
| `gpuflow.unfinished` | set | ids of the tasks that are not final |
| `gpuflow.untold` | zset | id of a cancelled task that Celery has still to be told of -> when it was cancelled |
| `gpuflow.merge` | hash | counts of merged calls: `calls`, `new`, `coalesced`, `batched`, `hit`, ...; `kept_bytes` |
| `gpuflow.merge.results` | zset | digest of a call whose result may be used again -> when it is forgotten |
| `gpuflow.merge.sizes` | hash | digest -> bytes of that result |
| `merge:call:<digest>` | string | the run that answers this very call, or holds its result |
| `merge:batch:<digest>` | string | the run that takes compatible calls while it waits |
| `merge:<run>:calls` | hash | digest -> spec of each different call of a run |
| `merge:<run>:callers:<digest>` | set | callers of one call that have not been told of its end |
| `pipeline:<id>` | hash | the pipeline record |
| `pipeline:<id>:stages` | hash | stage name -> JSON of the stage's state |
| `gpuflow.pipelines` | zset | pipeline id -> when it was submitted |
| `events:<id>` | stream | the events of one task or pipeline, capped |
| `gpuflow.queues` | set | demand queues that are asked for |
| `queue:<name>` | hash | the requirement of one demand queue, and when it was last used |
| `queue:<name>:classes` | zset | class of workers -> how well it suits (least first); -1: it does not serve the queue |
| `gpuflow.workers` | set | worker ids |
| `worker:<id>` | hash | one worker: capability, labels, state, `load`, `newer_load` since the last heartbeat |
| `worker:<id>:hb` | string | its heartbeat; the key expires when the worker is silent |
| `gpuflow.scaling` | hash | counts of scaling, what it has cost, failures and retry times of families |
| `gpuflow.scaling.leader` | hash | which beat scales: `owner`, `epoch`, `until` |
| `gpuflow.scaling.decisions` | list | the newest decisions of scaling with their reasons, JSON |
| `gpuflow.machines` | hash | machine id -> JSON of a machine that scaling has launched |
| `gpuflow.audit` | stream | the audit log: one entry for each action (see `audit.entries`) |
| `gpuflow.audit.chain` | stream | links of its chain (see `audit.chain`) |
| `gpuflow.audit.sent:<call>` | string | a call has appended to the audit log; expires after two minutes |
| `gpuflow.machines.unknown` | string | JSON list of machines that may be of another fleet; it expires |
| `gpuflow.served` | hash | name -> JSON of a served model: what is loaded, for whom (see `serving.models`) |
| `gpuflow.served.counts` | hash | name -> how many replicas there are to be |
| `gpuflow.served.replicas` | hash | task id of a replica -> name of its model, newline, `uid` of its record |
| `gpuflow.served.failures` | hash | name -> JSON of how replicas have failed of late: `count`, `at`, `error` |
| `gpuflow.served.lock` | string | lock of who submits and cancels replicas |
| `gpuflow.fleet` | string | the random id of this fleet |
| `gpuflow.protocol` | zset | `oldest` -> the oldest fleet protocol of workers that may start (see `fleet.versions`) |
| `gpuflow.schedules` | hash | name -> JSON of a schedule: its cron expression, zone, owner, when it was made |
| `gpuflow.schedules.templates` | hash | name -> JSON of what a schedule submits |
| `gpuflow.schedules.runs` | hash | name -> JSON of the last run of a schedule |
| `access:token:<id>` | hash | a token: its SHA-256, and of whom, with which role, until when it is |
| `access:tokens` | zset | token id -> when it was made |
| `access:workers` | hash | name of a worker -> id of its token |
| `access:deleted` | zset | id of a worker's token that was removed -> when (90 days) |
| `access:lock` | string | lock of who changes the broker's users; expires |

Workers with a token of their own may use all of them but those that begin with `access:` (`tokens.broker_users`).

No queue may be named like one of them; `gpuflow.control`, `gpuflow.notices` and `gpuflow.callbacks` are the only queues
whose names begin with `gpuflow.`.
The optional global prefix (GPUFLOW_KEY_PREFIX) stands before every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Field of `gpuflow.metrics`: when the reconciler ran last (Unix seconds on the server's clock).
RECONCILED_AT: Final = "reconciled_at"


@dataclass(frozen=True)
class Keys:
    """Key names under one global prefix."""

    prefix: str = ""

    @property
    def unacked(self) -> str:
        """Hash of leased messages."""
        return f"{self.prefix}gpuflow.unacked"

    @property
    def leases(self) -> str:
        """Sorted set of lease ends."""
        return f"{self.prefix}gpuflow.leases"

    @property
    def owners(self) -> str:
        """Hash of lease owners."""
        return f"{self.prefix}gpuflow.owners"

    @property
    def protocol(self) -> str:
        """Sorted set of the versions that may work in this fleet."""
        return f"{self.prefix}gpuflow.protocol"

    @property
    def ready(self) -> str:
        """Index of the demand queues that have waiting messages."""
        return f"{self.prefix}gpuflow.ready"

    @property
    def fallbacks(self) -> str:
        """Waiting tasks that have other alternatives, and when they move on."""
        return f"{self.prefix}gpuflow.fallbacks"

    @property
    def classes(self) -> str:
        """Set of the classes of workers."""
        return f"{self.prefix}gpuflow.classes"

    def warm(self, model: str) -> str:
        """Key that lives while some worker has a model."""
        return f"{self.prefix}gpuflow.warm:{model}"

    def reserved(self, tag: str) -> str:
        """Key that lives while a machine is reserved for a message."""
        return f"{self.prefix}gpuflow.reserved:{tag}"

    def waiters(self, group: str) -> str:
        """Set of the doorbells of one plain queue or one class of workers."""
        return f"{self.prefix}gpuflow.waiters:{group}"

    @property
    def returned(self) -> str:
        """Delivery tags of messages that went back undone."""
        return f"{self.prefix}gpuflow.returned"

    @property
    def unreadable(self) -> str:
        """List of messages that could not be parsed."""
        return f"{self.prefix}gpuflow.unreadable"

    @property
    def sweep(self) -> str:
        """Hash of the last sweep."""
        return f"{self.prefix}gpuflow.sweep"

    @property
    def delayed(self) -> str:
        """Sorted set of messages that wait for their time."""
        return f"{self.prefix}gpuflow.delayed"

    @property
    def parked(self) -> str:
        """Hash of delayed messages."""
        return f"{self.prefix}gpuflow.parked"

    def replaced(self, tag: str) -> str:
        """That what replaced the task of a message was published."""
        return f"{self.prefix}gpuflow.sent:replaced:{tag}"

    @property
    def present(self) -> str:
        """Set of workers seen since the server was restarted."""
        return f"{self.prefix}gpuflow.present"

    @property
    def dead(self) -> str:
        """Index of dead letters."""
        return f"{self.prefix}gpuflow.dead"

    @property
    def repairs(self) -> str:
        """Counts of repairs."""
        return f"{self.prefix}gpuflow.repairs"

    @property
    def metrics(self) -> str:
        """Counts of tasks and attempts."""
        return f"{self.prefix}gpuflow.metrics"

    @property
    def untold(self) -> str:
        """Cancelled tasks that Celery has still to be told of."""
        return f"{self.prefix}gpuflow.untold"

    @property
    def unfinished(self) -> str:
        """Set of the tasks that are not final."""
        return f"{self.prefix}gpuflow.unfinished"

    @property
    def tasks(self) -> str:
        """Index of task ids."""
        return f"{self.prefix}gpuflow.tasks"

    @property
    def pipelines(self) -> str:
        """Index of pipeline ids."""
        return f"{self.prefix}gpuflow.pipelines"

    @property
    def queues(self) -> str:
        """Set of demand queues."""
        return f"{self.prefix}gpuflow.queues"

    @property
    def workers(self) -> str:
        """Set of worker ids."""
        return f"{self.prefix}gpuflow.workers"

    @property
    def merge(self) -> str:
        """Counts of merged calls."""
        return f"{self.prefix}gpuflow.merge"

    @property
    def merge_results(self) -> str:
        """Results that may be used again."""
        return f"{self.prefix}gpuflow.merge.results"

    @property
    def merge_sizes(self) -> str:
        """Bytes of the results that may be used again."""
        return f"{self.prefix}gpuflow.merge.sizes"

    def merge_calls(self, run_id: str) -> str:
        """The different calls of a run."""
        return f"{self.prefix}merge:{run_id}:calls"

    def merge_callers(self, run_id: str, digest: str) -> str:
        """The callers of one call of a run."""
        return f"{self.prefix}merge:{run_id}:callers:{digest}"

    def bell(self, owner: str) -> str:
        """Doorbell of one consumer."""
        return f"{self.prefix}gpuflow.bell:{owner}"

    def task(self, task_id: str) -> str:
        """Record of one task."""
        return f"{self.prefix}task:{task_id}"

    def celery_result(self, task_id: str) -> str:
        """Celery's own result entry of one task."""
        return f"{self.prefix}celery-task-meta-{task_id}"

    def attempts(self, task_id: str) -> str:
        """How each attempt of one task went."""
        return f"{self.prefix}task:{task_id}:attempts"

    def pipeline(self, pipeline_id: str) -> str:
        """Record of one pipeline."""
        return f"{self.prefix}pipeline:{pipeline_id}"

    def stages(self, pipeline_id: str) -> str:
        """Stage states of one pipeline."""
        return f"{self.prefix}pipeline:{pipeline_id}:stages"

    def events(self, record_id: str) -> str:
        """Event stream of one task or pipeline."""
        return f"{self.prefix}events:{record_id}"

    def queue(self, name: str) -> str:
        """Requirement of one demand queue."""
        return f"{self.prefix}queue:{name}"

    def queue_classes(self, name: str) -> str:
        """Which classes of workers serve one demand queue."""
        return f"{self.prefix}queue:{name}:classes"

    @property
    def scaling(self) -> str:
        """Counts of scaling, and what holds families back."""
        return f"{self.prefix}gpuflow.scaling"

    @property
    def scaling_leader(self) -> str:
        """Which beat scales."""
        return f"{self.prefix}gpuflow.scaling.leader"

    @property
    def scaling_decisions(self) -> str:
        """The newest decisions of scaling."""
        return f"{self.prefix}gpuflow.scaling.decisions"

    @property
    def machines(self) -> str:
        """Machines that scaling has launched."""
        return f"{self.prefix}gpuflow.machines"

    @property
    def unknown_machines(self) -> str:
        """Machines that may be of another fleet."""
        return f"{self.prefix}gpuflow.machines.unknown"

    @property
    def served(self) -> str:
        """Served models by name."""
        return f"{self.prefix}gpuflow.served"

    @property
    def served_counts(self) -> str:
        """How many replicas of each served model there are to be."""
        return f"{self.prefix}gpuflow.served.counts"

    @property
    def served_replicas(self) -> str:
        """Which tasks are replicas, and of which served model."""
        return f"{self.prefix}gpuflow.served.replicas"

    @property
    def served_failures(self) -> str:
        """How replicas of each served model have failed."""
        return f"{self.prefix}gpuflow.served.failures"

    @property
    def schedules(self) -> str:
        """Schedules by name."""
        return f"{self.prefix}gpuflow.schedules"

    @property
    def schedule_templates(self) -> str:
        """What each schedule submits."""
        return f"{self.prefix}gpuflow.schedules.templates"

    @property
    def schedule_runs(self) -> str:
        """How far each schedule has come."""
        return f"{self.prefix}gpuflow.schedules.runs"

    @property
    def fleet_id(self) -> str:
        """The random id of this fleet."""
        return f"{self.prefix}gpuflow.fleet"

    def used(self, signature: str) -> str:
        """Key that lives while a signature is valid whose message was acknowledged."""
        return f"{self.prefix}gpuflow.used:{signature}"

    def wish(self, machine: str) -> str:
        """What a task of some worker of a machine finds no GPU for."""
        return f"{self.prefix}gpuflow.wish:{machine}"

    def worker(self, worker_id: str) -> str:
        """Hash of one worker."""
        return f"{self.prefix}worker:{worker_id}"

    def heartbeat(self, worker_id: str) -> str:
        """Heartbeat key of one worker."""
        return f"{self.prefix}worker:{worker_id}:hb"

    @property
    def audit(self) -> str:
        """The audit log."""
        return f"{self.prefix}gpuflow.audit"

    @property
    def audit_chain(self) -> str:
        """The links of its chain."""
        return f"{self.prefix}gpuflow.audit.chain"

    def audit_sent(self, call: str) -> str:
        """Key that lives while a repeat of a call to append may come."""
        return f"{self.prefix}gpuflow.audit.sent:{call}"

    def token(self, token_id: str) -> str:
        """Hash of one token."""
        return f"{self.prefix}access:token:{token_id}"

    @property
    def tokens(self) -> str:
        """Index of token ids."""
        return f"{self.prefix}access:tokens"

    @property
    def token_workers(self) -> str:
        """Names of workers that have a token."""
        return f"{self.prefix}access:workers"

    @property
    def tokens_deleted(self) -> str:
        """Ids of removed tokens of workers, whose users of the broker must not come back."""
        return f"{self.prefix}access:deleted"

    @property
    def token_lock(self) -> str:
        """Lock of who changes the broker's users."""
        return f"{self.prefix}access:lock"
