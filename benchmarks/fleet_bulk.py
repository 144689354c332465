"""Fills the queues for fleet_scale.py: the first tasks one by one as users do, the rest as copies of these.

A copy is the same publish step (record, queue registration, message, event), sent in pipelines, with an id, a delivery
tag and a requirement of its own. What it costs the broker is the same; the submitter's own work (checks, the building
of the message) is done once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gpuflow.broker import transport
from gpuflow.broker.scripts import broker_script
from gpuflow.routing.requirement import Requirement

#: Publish steps of one pipeline.
BATCH = 250


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One publish step as it was sent."""

    keys: tuple[str, ...]
    args: tuple[Any, ...]

    def copy(self, memory_mib: int) -> Submission:
        """Return the submission of another task that asks for so much memory, and otherwise for the same."""
        tag, task, queue, asked = (str(self.args[place]) for place in (3, 4, 5, 6))
        requirement = replace(Requirement.from_dict(json.loads(asked)), memory_mib=memory_mib)
        others = {
            tag: str(uuid.uuid4()),
            task: str(uuid.uuid4()),
            asked: json.dumps(requirement.to_dict()),
            queue: requirement.queue_name(),
        }

        def changed(value: Any) -> Any:
            if isinstance(value, str):
                for old, new in others.items():
                    value = value.replace(old, new)
            return value

        return Submission(keys=tuple(map(changed, self.keys)), args=tuple(map(changed, self.args)))


@contextmanager
def recorded() -> Iterator[list[Submission]]:
    """Collect the publish steps that this process sends meanwhile."""
    seen: list[Submission] = []
    real = transport.broker_script

    def spy(name: str) -> Any:
        script = real(name)

        def run(client: Any, keys: list[str], args: list[Any]) -> Any:
            seen.append(Submission(keys=tuple(keys), args=tuple(args)))
            return script(client, keys, args)

        return run if name == "publish" else script

    transport.broker_script = spy
    try:
        yield seen
    finally:
        transport.broker_script = real


def send(client: Any, submissions: Iterator[Submission], say: Callable[[int], None]) -> None:
    """Send publish steps in pipelines; `say` gets how many were sent."""
    script = broker_script("publish")
    script.load(client)
    pipe = client.pipeline(transaction=False)
    for sent, one in enumerate(submissions, 1):
        pipe.execute_command("EVALSHA", script.sha, len(one.keys), *one.keys, *one.args)
        if sent % BATCH == 0:
            _execute(pipe)
            say(sent)
    _execute(pipe)


def _execute(pipe: Any) -> None:
    if any(answer != 1 for answer in pipe.execute()):
        raise SystemExit("a task was not published: its record was there already")
