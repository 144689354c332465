"""The child of one call of a team's function: `python -m gpuflow.functions`, started by a worker (`function_delivery`).

It imports what the worker has imported of the team's, with the worker's own path and environment, and calls the
function on its main thread, so that a limit interrupts whatever it waits for. What comes of it goes to the worker,
which tells Celery. With the word `session`, it stays warm (`gpuflow.functions.warm`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, NoReturn

from celery import signals
from celery.exceptions import SoftTimeLimitExceeded

from gpuflow.functions import warm
from gpuflow.functions.calling import become, begin, conduct
from gpuflow.functions.calls import NOTICE, SOFT_LIMIT, Call
from gpuflow.process_guard import guard_memory
from gpuflow.protocol import Emitter, Request, take_stdin
from gpuflow.surroundings import notice


def main() -> int:
    """Run one call to its end, or those of a session."""
    guard_memory()
    emitter = Emitter.claim_stdout()
    orders = take_stdin()
    if sys.argv[1:] == [warm.SESSION]:
        return warm.serve(emitter, orders)
    request = Request.from_json(orders.readline().decode("utf-8"))
    emitter.output_dir = request.output_dir
    call = Call.from_dict(request.spec["function"])
    become(call)
    emitter.status("working")
    return conduct(call, request, emitter, partial(begin, call), partial(_interruptible, orders))


@contextmanager
def _interruptible(orders: BinaryIO) -> Iterator[Callable[[], None]]:
    def over() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    try:
        signal.signal(signal.SIGUSR2, _soft)
        threading.Thread(target=_listen, args=(orders,), name="gpuflow-orders", daemon=True).start()
        yield over
    finally:
        over()


def _soft(*_: object) -> NoReturn:
    raise SoftTimeLimitExceeded


def _listen(orders: BinaryIO) -> None:
    """Pass on what the worker says while the function runs. A signal interrupts a call that waits."""
    main_thread = threading.main_thread().ident
    for line in orders:
        if line.strip() == SOFT_LIMIT and main_thread is not None:
            signal.pthread_kill(main_thread, signal.SIGUSR2)
        if line.strip() == NOTICE:
            notice()


def leave(code: int) -> NoReturn:
    """End the process as Celery ends one of its pool: no thread is waited for, and nothing runs that could fail now."""
    with contextlib.suppress(Exception):
        signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=code)
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run(work: Callable[[], int] = main) -> NoReturn:
    """Run the work of this process, and end it, whatever comes of it."""
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (the log has it, and the worker the exit code)
        traceback.print_exc()
        code = 1
    leave(code & 0xFF)


if __name__ == "__main__":
    run()
