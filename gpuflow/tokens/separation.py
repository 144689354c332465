"""What has to hold before a worker's user of the broker is a wall between fleets, and what is missing for that. Pure.

A pattern of Redis knows beginnings of names alone. So a worker without a prefix reaches whatever begins like a key of
gpuflow, and one of `a:` what begins like one after `a:`.
"""

from __future__ import annotations

from typing import Final

#: How the keys begin that a worker may use (`broker_users`).
FAMILIES: Final = (
    "gpuflow.", "task:", "pipeline:", "events:", "merge:", "queue:", "worker:", "celery-task", "cpu-", "cpu.", "gpu-",
    "gpu.", "_kombu.binding",
)  # fmt: skip
#: How keys of a fleet begin, behind its prefix.
_OWN: Final = ("", *FAMILIES, "access:", "tasks")
#: What an operator says who knows better: an option of the command line, and a field over HTTP.
ONLY_FLEET: Final = "add --only-fleet (over HTTP `onlyFleet`: true)"
_MEND: Final = f"set a GPUFLOW_KEY_PREFIX such as `team1:`, or where no other fleet is on this server {ONLY_FLEET}"


def mistaken_family(prefix: str) -> str:
    """Return the family of keys that keys of a fleet would be taken for by workers of another one; '' for none.

    `gpu-lab:` begins like the demand queue `gpu-lab`, and `celery-` with `task:1` like a result of Celery.
    """
    parts = prefix.split(":")
    ends = (":".join(parts[number:]) for number in range(len(parts)))
    named = [end + own for end in ends if end for own in _OWN]
    return next((family for family in FAMILIES if any(name.startswith(family) for name in named)), "")


def missing_wall(prefix: str) -> str:
    """Return why workers of a fleet would reach other fleets of their server, with its mend; '' where they do not."""
    if not prefix:
        return f"the fleet has no prefix, so its workers reach keys of other fleets; {_MEND}"
    if not prefix.endswith(":"):
        return f"the prefix {prefix!r} does not end with ':', so another may begin with it; {_MEND}"
    if family := mistaken_family(prefix):
        return f"the prefix {prefix!r} looks like the keys {family}* of other fleets, whose workers reach it; {_MEND}"
    return ""


def wrong_database(prefix: str, database: int) -> str:
    """Return why a database holds no worker with a token, with its mend; '' where it does.

    A connection is in database 0 when it has logged in, and rights over keys are those of every database.
    """
    if prefix or not database:
        return ""
    return (
        f"the fleet is in database {database} without a prefix, and its workers would reach database 0; set "
        "GPUFLOW_KEY_PREFIX, such as `team1:`"
    )
