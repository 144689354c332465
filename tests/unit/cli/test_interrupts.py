"""A signal that comes while an object is finalised ends the command all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import patient

#: The signal comes inside __del__, where Python reports what is raised and goes on.
PROGRAM = """
import os, signal, sys, time
from gpuflow.cli.errors import Terminated, guarded
from gpuflow.cli.interrupts import keep_interrupts

def terminated(number, frame):
    raise Terminated(number)

class Lost:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
        for _ in range(1000):
            pass

def command():
    Lost()
    print("goes on", flush=True)
    time.sleep(600)

signal.signal(signal.SIGTERM, terminated)
keep_interrupts()
sys.exit(guarded(command))
"""


@pytest.mark.parametrize(("number", "code"), [("signal.SIGINT", 130), ("signal.SIGTERM", 143)])
def test_a_signal_that_was_lost_comes_again(number: str, code: int) -> None:
    argv = [sys.executable, "-c", PROGRAM.replace("NUMBER", number)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient(30), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "goes on\n", "")


def test_any_other_error_of_a_finaliser_is_reported() -> None:
    program = PROGRAM.replace("os.kill(os.getpid(), NUMBER)", "raise ValueError('left')").replace("600", "0")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Exception ignored in" in done.stderr
    assert "ValueError: left" in done.stderr
