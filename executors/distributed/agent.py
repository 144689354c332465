"""The agent of a task's ranks: torchrun's own, with a store on loopback, and the ranks' output brought together.

`python -m executors.distributed.agent PARENT PROCESSES FOLDER`, with the request as a file on stdin. Its stdout is
that of rank 0; what any rank prints otherwise goes to stderr with the rank's number before each line. At the end, a
line `{"event": "ranks_ended", "failures": [...]}` says how the ranks ended that did not complete. SIGTERM ends all
ranks, SIGUSR1 is passed on to each.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executors.distributed.processes import Roster, end_with
from executors.distributed.records import RANKS_ENDED
from executors.programs.lines import split_lines
from gpuflow.protocol import Emitter

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

#: Ranks that are told to stop have this time, in seconds; then they are killed.
_STOP_SECONDS: Final = 5
#: How often it is seen that a rank has ended, in seconds.
_WATCH_SECONDS: Final = 0.1
_STORE_SECONDS: Final = 300
_CHUNK_BYTES: Final = 65_536


def main() -> int:
    """Run the ranks to their end; return 0 if all completed."""
    parent, processes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    roster = Roster(folder)
    signal.signal(signal.SIGUSR1, lambda *_: roster.give_notice())
    os.setpgid(0, 0)  # a signal to the group of the task is passed on by the launcher, once
    end_with(parent)
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        failures = _run(processes, folder)
    except SignalException as end:
        return 128 + end.sigval
    os.write(1, b"\n")  # a rank that was killed may have left half a line
    Emitter(sys.stdout).emit(RANKS_ENDED, failures=failures)
    return 1 if failures else 0


def _run(processes: int, folder: Path) -> list[dict[str, Any]]:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torchrun's own store would listen on every address of the machine. This one is found by its port.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
    )
    outputs = _Outputs()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="ranks",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0, "timeout": _STORE_SECONDS},
        max_restarts=0,
        monitor_interval=_WATCH_SECONDS,
        local_addr="127.0.0.1",
        logs_specs=_logs_specs(folder, outputs),
        shutdown_timeout=_STOP_SECONDS,
    )
    argv = ("-P", "-m", "executors.distributed.rank", str(os.getpid()), str(folder))
    try:
        elastic_launch(config, sys.executable)(*argv)
    except ChildFailedError as error:
        return [
            {"rank": rank, "pid": one.pid, "exit_code": one.exitcode, "content": one.error_file_data}
            for rank, one in error.failures.items()
        ]
    finally:
        outputs.close()
        del store
    return []


def _logs_specs(folder: Path, outputs: _Outputs) -> LogsSpecs:
    """Return where torchrun sends the output of each rank: rank 0's events to our stdout, all else to `outputs`."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Specs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destinations = LogsDest()
            for local_rank, environment in envs.items():
                rank = int(environment["RANK"])
                pipe = outputs.add(rank)
                destinations.stderrs[local_rank] = pipe
                destinations.stdouts[local_rank] = pipe if rank else ""
                error_file = str(folder / f"rank-{rank}.error.json")
                destinations.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = error_file
            return destinations

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return Specs()


class _Outputs:
    """Pipes that ranks write into; a thread for each writes their lines to stderr, behind the rank's number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended, self._end = os.pipe()

    def add(self, rank: int) -> str:
        """Return the path of a new pipe for a rank."""
        read, write = os.pipe()
        thread = threading.Thread(target=self._copy, args=(read, rank), name=f"gpuflow-rank-{rank}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return f"/proc/self/fd/{write}"

    def close(self) -> None:
        """Write out what the ranks have written, once they have ended; what they left behind may hold pipes open."""
        os.close(self._end)
        for thread in self._threads:
            thread.join()

    def _copy(self, read: int, rank: int) -> None:
        for line in split_lines(self._chunks(read)):
            with self._lock:
                sys.stderr.buffer.write(b"[rank %d] %s\n" % (rank, line))
                sys.stderr.buffer.flush()

    def _chunks(self, read: int) -> Iterator[bytes]:
        os.set_blocking(read, False)
        poller = select.poll()
        poller.register(read, select.POLLIN)
        poller.register(self._ended, select.POLLIN)
        while ready := {descriptor for descriptor, _ in poller.poll()}:
            if read in ready:
                if not (chunk := os.read(read, _CHUNK_BYTES)):
                    return
                yield chunk
            elif self._ended in ready:
                return


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what ranks have left behind holds nothing up
