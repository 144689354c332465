"""What every part of the policy answers with: why it refuses, and which setting would allow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One thing of a task that a worker's policy refuses.

    `path` is where it stands in the template (`model.source.trust_remote_code`), `setting` the variable of the worker
    that would allow it, `message` the sentence for people: the thing, the cause, and that setting.
    """

    path: str
    setting: str
    message: str
