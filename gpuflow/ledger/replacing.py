"""REPLACE: a task gives its id to another one."""

from __future__ import annotations

from typing import Literal

from gpuflow.ledger.ledger import Holder, Ledger, ledger_script


def replace_task(ledger: Ledger, task_id: str, holder: Holder) -> Literal["replaced", "cancel", "refused"]:
    """Forget the record of a running task, so that the next publish may use its id (lua/replace.lua).

    `cancel`: a user wants it cancelled; `refused`: it does not run by this attempt. Raises redis errors.
    """
    keys = ledger.keys
    answer: Literal["replaced", "cancel", "refused"] = ledger_script("replace")(
        ledger.client,
        [keys.task(task_id), keys.events(task_id), keys.attempts(task_id), keys.tasks, keys.unfinished],
        [task_id, str(holder.attempt), holder.token],
    )
    return answer
