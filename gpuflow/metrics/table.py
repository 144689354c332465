"""Lists every metric: name, kind, labels, and what it tells. The exposition and the table in the docs follow it.

Names by the conventions of Prometheus: base units, counters end in `_total`. No label holds a task id, an owner or a
prompt: those are without bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One metric; `name` is without the suffix that Prometheus adds (`_total` of a counter, `_info`)."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str

    @property
    def shown_name(self) -> str:
        """The name as queries spell it; of a histogram, the one that `_bucket`, `_sum` and `_count` are added to."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _row(name: str, kind: Kind, labels: str, text: str) -> MetricRow:
    return MetricRow(name=f"gpuflow_{name}", kind=kind, labels=tuple(labels.split()), text=text)


_ROWS: Final = (
    _row("build", "info", "version", "The version of gpuflow that serves this page"),
    # tasks
    _row("tasks_submitted", "counter", "type queue", "Tasks that were accepted, also again by hand"),
    _row("tasks", "counter", "state type queue", "Tasks that have ended, by final state"),
    _row("tasks_unfinished", "gauge", "", "Tasks that have not ended"),
    _row("tasks_delayed", "gauge", "", "Tasks that wait for their time, such as the pause before a retry"),
    _row("task_wait_seconds", "histogram", "type", "Time from when a task could be taken until an attempt began"),
    _row("task_run_seconds", "histogram", "type", "Time of attempts that succeeded"),
    _row("attempts_started", "counter", "type", "Attempts that have begun"),
    _row("attempts", "counter", "outcome type", "Attempts that have ended; outcome lost: their worker was gone"),
    _row("dead_letters", "gauge", "", "Tasks that used up their attempts and are kept"),
    _row("unreadable_messages", "gauge", "", "Messages that nobody could read or run, kept aside"),
    _row(
        "messages_refused",
        "counter",
        "reason mode",
        "Messages that are not signed as they must be; mode sign: still run",
    ),
    # queues and leases
    _row("queue_tasks", "gauge", "queue state", "Tasks of a queue that wait, or that a worker holds (running)"),
    _row("queue_oldest_seconds", "gauge", "queue", "How long the oldest waiting task of a queue has waited"),
    _row("queue_workers", "gauge", "queue", "Enabled workers that serve a queue"),
    _row("leases", "gauge", "", "Messages that workers hold"),
    _row("leases_lost", "gauge", "", "Messages whose lease has ended and that wait for a sweep"),
    # workers
    _row("workers", "gauge", "state", "Workers by state"),
    _row("workers_standing", "gauge", "standing", "Workers by what is to be known of them beside their state"),
    _row("workers_disabled", "gauge", "", "Workers that are there and take no work"),
    _row(
        "workers_unreadable", "gauge", "", "Entries of workers that this version cannot read; no other metric has them"
    ),
    _row("worker_heartbeat_age_seconds", "gauge", "worker", "Time since the last heartbeat of a worker that is there"),
    _row("worker_tasks", "gauge", "worker", "Tasks and requests that a worker holds"),
    _row("worker_disk_free_bytes", "gauge", "worker", "Free disk where a worker writes results"),
    # GPUs
    _row("gpu_memory_size_bytes", "gauge", "worker gpu model", "Memory of a GPU"),
    _row("gpu_memory_used_bytes", "gauge", "worker gpu model", "Memory of a GPU that is in use, by anybody"),
    _row("gpu_memory_leased_bytes", "gauge", "worker gpu model", "Memory of a GPU that tasks of gpuflow hold"),
    _row("gpu_memory_foreign_bytes", "gauge", "worker gpu model", "Memory of a GPU that others use"),
    _row("gpu_utilization_ratio", "gauge", "worker gpu model", "Share of the time in which a GPU computes, 0 to 1"),
    # use
    _row("gpu_seconds", "counter", "type", "GPU-seconds that attempts have used"),
    _row("energy_joules", "counter", "type", "Energy that GPUs of attempts have used, where the driver tells it"),
    _row("cost", "counter", "type", "What attempts have cost, in the unit of the workers' --cost"),
    _row("artifact_bytes", "counter", "type", "Bytes of the artifacts of attempts that succeeded"),
    # merged calls
    _row("merge_calls", "counter", "", "Calls that could be merged"),
    _row("merge_runs", "counter", "", "Runs that such calls have begun"),
    _row("merge_coalesced", "counter", "", "Calls that joined a run of the very same call"),
    _row("merge_batched", "counter", "", "Calls that joined a waiting run of compatible ones"),
    _row("merge_hits", "counter", "", "Calls that an earlier result has answered"),
    _row("merge_regrouped", "counter", "", "Calls of a run that were tried again by themselves"),
    _row("merge_released", "counter", "", "Calls that ran by themselves because their run was gone"),
    _row("merge_saved_generations", "counter", "", "Answers that did not have to be generated"),
    _row("merge_saved_tokens", "counter", "", "Tokens of these answers"),
    _row("merge_kept_results", "gauge", "", "Results that may answer further calls"),
    _row("merge_kept_result_bytes", "gauge", "", "Bytes of these results"),
    # served models
    _row("served_models", "gauge", "", "Models that are served (`gpuflow serve`)"),
    _row("served_replicas", "gauge", "model", "Workers that are to keep a served model loaded"),
    _row("served_replicas_loaded", "gauge", "model", "Workers that have it loaded for calls"),
    _row("served_failures", "gauge", "model", "Replicas of it that have failed for good since one was loaded"),
    _row("served_calls", "counter", "model outcome", "Calls of /v1: answered, failed, cancelled or refused"),
    _row("served_first_token_seconds", "histogram", "model", "Time until a streamed call of /v1 had its first text"),
    # scaling and upkeep
    _row(
        "scaling_actions", "counter", "action", "What scaling has done: enable, disable, drain, retire, launched, ..."
    ),
    _row("scaling_leader", "gauge", "", "Whether a beat scales the fleet (1 or 0)"),
    _row("machines", "gauge", "family state", "Machines that scaling has launched and not ended"),
    _row("machines_cost_per_hour", "gauge", "", "What these cost in an hour"),
    _row("repairs", "counter", "kind", "Repairs that the reconciler has made"),
    _row("reconciled_timestamp_seconds", "gauge", "", "When the reconciler of beat ran last (Unix time; 0: never)"),
    # the broker; absent where the login of the gateway may not ask (INFO)
    _row("broker_memory_used_bytes", "gauge", "", "Memory that the broker uses"),
    _row("broker_memory_max_bytes", "gauge", "", "Memory that it may use; 0: no limit"),
    _row("broker_aof_enabled", "gauge", "", "Whether it keeps an append-only file (1 or 0)"),
    _row("broker_aof_last_write_ok", "gauge", "", "Whether its last write to that file succeeded (1 or 0)"),
    _row("broker_clients", "gauge", "", "Connections that it has"),
)

#: Name without suffix -> row.
METRICS: Final[dict[str, MetricRow]] = {row.name: row for row in _ROWS}
