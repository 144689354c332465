"""A Ctrl-C that Python loses: it comes while an object is finalised, is only reported there, and the command goes on.

Called once, by the command line as a program; it knows no command.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, Final

from gpuflow.cli.errors import Terminated

#: A lost signal comes again after so many seconds, when what has lost it is over.
_AGAIN_SECONDS: Final = 0.01


def keep_interrupts() -> None:
    """Send a signal again whose KeyboardInterrupt was raised where Python goes on whatever is raised."""
    former = sys.unraisablehook

    def told(lost: Any) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            former(lost)
            return
        number = lost.exc_value.number if isinstance(lost.exc_value, Terminated) else signal.SIGINT
        again = threading.Timer(_AGAIN_SECONDS, _send, [number])
        again.daemon = True
        with suppress(RuntimeError):  # the process ends: no thread begins any more
            again.start()

    sys.unraisablehook = told


def _send(number: int) -> None:
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


__all__ = ["keep_interrupts"]
