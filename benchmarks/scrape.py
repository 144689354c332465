"""What one scrape of the metrics costs with a large fleet: 500 workers of 4 GPUs, 20,000 waiting tasks in 40 queues.

    python benchmarks/scrape.py [--json]

Rows: seconds of a scrape that reads the broker (median, worst), its part in the broker's own thread, seconds of one
that is answered from the last, and the bytes of the page. Everything is on one machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry, generate_latest

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.broker.keys import Keys
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.metrics.collector import FleetCollector

WORKERS, GPUS, TASKS, QUEUES, ROUNDS = 500, 4, 20_000, 40, 15


def announce(client: Any, keys: Keys) -> None:
    """Write the entries of all workers."""
    for number in range(WORKERS):
        uuids = [f"GPU-{number}-{gpu}" for gpu in range(GPUS)]
        cards = [
            {"uuid": uuid, "index": place, "names": ["a100"], "vram_gb": 80.0, "total_mib": 81920}
            for place, uuid in enumerate(uuids)
        ]
        Fleet(client, keys).announce(
            WorkerEntry(
                id=f"worker-{number}",
                state=WorkerState.BUSY,
                hostname=f"host-{number}",
                class_name=f"class-{number % 10}",
                capability={"schema": 1, "gpus": cards, "cpu_count": 64, "memory_mib": 512_000, "labels": {}},
                queues=("gpuflow.control", "gpuflow.notices", "gpuflow.callbacks", "tasks"),
                tasks=tuple(f"task-{number}-{place}" for place in range(GPUS)),
                load={
                    "jobs": GPUS,
                    "diskFreeMib": 100_000,
                    "freeGpus": [],
                    "gpusSeenAt": 1.0,
                    "roomMib": dict.fromkeys(uuids, 0),
                    "gpus": {uuid: {"freeMib": 1000, "utilizationPercent": 90} for uuid in uuids},
                },
                interval_seconds=30,
                timeout_seconds=120,
            )
        )


def fill(client: Any, keys: Keys) -> None:
    """Write waiting messages, leases and counts."""
    now = client.time()[0]
    pipe = client.pipeline(transaction=False)
    for number in range(TASKS):
        queue = f"gpu-a100.team=t{number % QUEUES}"
        pipe.lpush(f"{keys.prefix}{queue}", f'{{"at":{now}.0,"body": "{"x" * 1500}"}}')
        pipe.sadd(keys.unfinished, f"task-{number}")
    for number in range(QUEUES):
        queue = f"gpu-a100.team=t{number}"
        pipe.sadd(keys.queues, queue)
        pipe.hset(keys.queue(queue), mapping={"name": queue})
        pipe.zadd(keys.ready, {queue: 4e14 + now * 1e4})
        for state in ("SUCCEEDED", "FAILED", "CANCELLED"):
            pipe.hset(keys.metrics, f"ended\n{state}\nsft\n{queue}", 1000)
    for number in range(WORKERS * GPUS):
        pipe.zadd(keys.leases, {f"tag-{number}": now + 600})
        pipe.hset(keys.owners, f"tag-{number}", f"worker-{number}:x\ngpu-a100.team=t{number % QUEUES}")
    pipe.execute()


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        client: Any = redis.Redis.from_url(server.start(), decode_responses=True)
        try:
            keys = Keys()
            announce(client, keys)
            fill(client, keys)
            now = [0.0]
            registry = CollectorRegistry()
            registry.register(FleetCollector(client, keys, "tasks", clock=lambda: now[0]))
            read, cached, page = [], [], b""
            busy = float(client.info("cpu")["used_cpu_user_main_thread"])
            for _ in range(ROUNDS):
                now[0] += 10
                for seconds in (read, cached):
                    began = time.perf_counter()
                    page = generate_latest(registry)
                    seconds.append(time.perf_counter() - began)
            busy = float(client.info("cpu")["used_cpu_user_main_thread"]) - busy
        finally:
            client.close()
            server.stop()
    rows = {
        "scrape_p50_seconds": round(statistics.median(read), 4),
        "scrape_worst_seconds": round(max(read), 4),
        "scrape_broker_seconds": round(busy / ROUNDS, 4),
        "scrape_again_p50_seconds": round(statistics.median(cached), 4),
        "page_bytes": len(page),
    }
    print(json.dumps(rows) if "--json" in sys.argv else "\n".join(f"{name:28}{value}" for name, value in rows.items()))


if __name__ == "__main__":
    main()
