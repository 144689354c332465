"""One client process of test_merge_load: submits calls, cancels some of them meanwhile, waits for the ends of all.

Reads one JSON object from its input: `calls` (the number of the prompt of each call, in order), `cancel` (position of
a call -> position after which it is cancelled) and `wait_seconds`. Prints `ready`, begins with the next line of input,
and prints a JSON list with an object for each call: id, prompt, verdict of its cancellation, state, run, output.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpuflow.client import Task, submit

#: For how long a result may be used again: longer than any run of the test.
RESULT_TTL_SECONDS = 3600
#: How long an execution lasts, so that some are under way whenever a worker is killed.
SLEEP_SECONDS = 0.1
#: What the executor writes once for each execution.
TRACE = "executed.txt"


def answer_of(prompt: int) -> str:
    """Return the text that belongs to a prompt, and to no other."""
    return f"the answer to prompt {prompt}"


def call(prompt: int) -> dict[str, Any]:
    """Return the spec of a call."""
    return {
        "taskType": "echo",
        "echo": {"output": answer_of(prompt), "sleep_seconds": SLEEP_SECONDS, "artifact": TRACE},
        "merge": "always",
        "resultTtlSeconds": RESULT_TTL_SECONDS,
    }


def make_calls(calls: list[int], cancel: dict[int, int]) -> tuple[list[Task], dict[int, str]]:
    """Submit the calls, cancel those that are due after each; return their handles, and the verdicts by position."""
    due: dict[int, list[int]] = {}
    for position, after in cancel.items():
        due.setdefault(after, []).append(position)
    tasks: list[Task] = []
    verdicts = {}
    for position, prompt in enumerate(calls):
        tasks.append(submit(call(prompt)))
        for chosen in due.get(position, ()):
            verdicts[chosen] = tasks[chosen].cancel()
    return tasks, verdicts


def main() -> None:
    """Take part in the load and report."""
    given = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    calls = given["calls"]
    tasks, verdicts = make_calls(calls, {int(position): after for position, after in given["cancel"].items()})
    found = []
    for position, (prompt, task) in enumerate(zip(calls, tasks, strict=True)):
        record = task.wait(timeout=given["wait_seconds"])
        found.append(
            {
                "id": task.id,
                "prompt": prompt,
                "verdict": verdicts.get(position),
                "state": str(record.state),
                "run": record.run,
                "output": (record.result or {}).get("output"),
            }
        )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
