"""What an engine's own processes say when they cannot start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from executors.sessions.core_log import not_started, overheard

_STAMP = "(EngineCore pid=7) ERROR 11-21 17:00:00 [core.py:842]"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CACHE = "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization"


def say(*lines: str) -> str | None:
    """Have a process write lines as an engine core does, and return the error that was heard."""
    text = "\n".join(lines)
    with overheard() as heard:
        subprocess.run([sys.executable, "-I", "-S", "-c", f"import os; os.write(2, {text.encode()!r})"], check=True)
    return heard.error()


def test_the_cause_is_the_last_error_that_was_raised() -> None:
    told = say(
        f"{_STAMP} EngineCore failed to start.",
        f"{_STAMP} Traceback (most recent call last):",
        f"{_STAMP}   raise ValueError(",
        f"{_STAMP} {CACHE}",
        f"{_STAMP} RuntimeError: Worker failed. See stack trace for root cause.",
        f"{_STAMP} more of the message",
        "INFO 11-21 17:00:00 [core.py:1] KeyError: this is none",
        "no end",
    )
    assert told == CACHE


def test_without_an_error_there_is_none() -> None:
    assert say("a line", "") is None
    assert say(f"{_STAMP} it broke") == "it broke"


def test_what_is_heard_goes_on_and_the_descriptors_are_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    assert say("first", f"{_STAMP} second") == "second"
    print("after", file=sys.stderr)

    assert capfd.readouterr() == ("", f"first\n{_STAMP} secondafter\n")


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (CACHE, "EngineNotStarted"),
        (None, "EngineNotStarted"),
        (FULL, "OutOfMemory"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "DeviceFault"),
    ],
)
def test_an_engine_that_cannot_start_may_do_so_elsewhere(told: str | None, kind: str) -> None:
    error = not_started(RuntimeError("Engine core initialization failed."), told)

    assert (error.type, error.retryable) == (kind, True)
    assert (told or "initialization failed") in error.message
