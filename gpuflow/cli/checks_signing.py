"""What `gpuflow doctor` says of signed messages: here, and on the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpuflow.cli.checks import Check

if TYPE_CHECKING:
    from gpuflow.fleet.registry import WorkerEntry
    from gpuflow.settings import Settings

_HOWTO: Final = "docs/howto/sign-messages.md"
#: Workers that are named; the others are counted.
_MOST_NAMED: Final = 5


def signing_checks(settings: Settings) -> list[Check]:
    """Check the key of this process."""
    from gpuflow.errors import InvalidSettings
    from gpuflow.signatures import signer_of

    if settings.signing == "off":
        if settings.signing_key_file is None:
            return []
        detail = f"GPUFLOW_SIGNING is off, so {settings.signing_key_file} signs nothing"
        return [Check(name="signing", status="warn", detail=detail, mend=f"set it to sign, then require ({_HOWTO})")]
    try:
        signer = signer_of(settings)
    except InvalidSettings as error:
        return [Check(name="signing", status="fail", detail=str(error), mend=f"see {_HOWTO}")]
    told = signer.public() if signer is not None else {}
    more = [key for key in told.get("accepts", []) if key != told.get("key")]
    also = f", also takes {', '.join(more)}" if more else ""
    return [Check(name="signing", status="ok", detail=f"{told.get('mode')} with key {told.get('key')}{also}")]


def signing_of_workers(settings: Settings, there: Sequence[WorkerEntry]) -> list[Check]:
    """Warn of workers that take what this process would not, or would refuse what it signs."""
    from gpuflow.errors import InvalidSettings
    from gpuflow.signatures import signer_of

    told: dict[str, dict[str, Any]] = {}
    for worker in there:
        entry = worker.load.get("signing")
        told[worker.id] = entry if isinstance(entry, dict) else {}
    requiring = [worker for worker, entry in told.items() if entry.get("mode") == "require"]
    lax = [worker for worker, entry in told.items() if entry.get("mode") != "require"]
    found = []
    if requiring and lax:
        detail = f"messages that nobody has signed are run by {_named(lax)}, and sign what follows on them"
        found.append(_warn(detail, f"set GPUFLOW_SIGNING=require there ({_HOWTO})"))
    keys = {str(entry["key"]) for entry in told.values() if entry.get("key")}
    try:
        signer = signer_of(settings)
    except InvalidSettings:
        signer = None
    if signer is not None:
        keys.add(str(signer.public()["key"]))
    elif requiring:
        detail = f"{_named(requiring)} require signatures, and this process signs nothing"
        found.append(_warn(detail, f"set GPUFLOW_SIGNING and GPUFLOW_SIGNING_KEY_FILE here, too ({_HOWTO})"))
    for key in sorted(keys):
        without = [worker for worker, entry in told.items() if entry and key not in (entry.get("accepts") or ())]
        if without:
            detail = f"{_named(without)} refuse what key {key} has signed"
            found.append(_warn(detail, f"add that key to their GPUFLOW_SIGNING_KEY_FILE and restart them ({_HOWTO})"))
    return found


def _warn(detail: str, mend: str) -> Check:
    return Check(name="signing of workers", status="warn", detail=detail, mend=mend)


def _named(workers: Sequence[str]) -> str:
    more = len(workers) - _MOST_NAMED
    return ", ".join(workers[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


__all__ = ["signing_checks", "signing_of_workers"]
