"""Reads what a transfer in another process tells."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.support.waiting import patient


def last_line(child: subprocess.Popen[str], *, first: bool = False, within: float = 100) -> dict[str, Any]:
    """Return the last JSON line that a process prints, or its first one, without waiting for its end."""
    assert child.stdout is not None
    if first:
        line = child.stdout.readline()
    else:
        line = child.communicate(timeout=patient(within))[0].strip().rpartition("\n")[2]
    told = json.loads(line)
    assert isinstance(told, dict)
    return told
