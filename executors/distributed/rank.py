"""One rank of a task: runs the task's executor as the only process of a task would, and leaves a record if it fails.

`python -m executors.distributed.rank PARENT FOLDER`, started by torchrun, with the request as a file on stdin. Rank 0
writes its events to stdout. The others have nobody to tell: their events are dropped, and the files that belong to the
result go to a folder of their own that nobody reads. Checkpoints are common to all.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from executors import cancellation, task_access
from executors.base import plain
from executors.checkpoints import folder_of
from executors.distributed.processes import Roster, end_with
from executors.distributed.records import CANCELLED, is_from_peer, write_record
from gpuflow.importing import loading
from gpuflow.protocol import Emitter, Request

#: A file on stdin is opened anew by each rank: they share one stdin, and so its position.
_REQUEST = Path("/proc/self/fd/0")


def main() -> int:
    """Run the request as this rank. Exit codes: 0 done, or ended by a notice; 1 failed, 143 told to stop."""
    parent, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    end_with(parent)
    emitter = Emitter.claim_stdout() if rank == 0 else Emitter(os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    record = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        cancellation.install()
        Roster(folder).enter(rank)
        request = Request.from_json(_REQUEST.read_text("utf-8"))
        task_access.use(request)
        emitter.output_dir = request.output_dir
        result = plain(_run(_as_rank(request, rank, folder), emitter))
        cancellation.ignore()
        if rank == 0:
            emitter.result(result)
    except cancellation.Preempted as end:
        cancellation.ignore()
        emitter.finish("cancelled", end.record())
    except cancellation.Cancelled:
        cancellation.ignore()
        write_record(record, None, stopped=True)
        return CANCELLED
    except Exception as error:  # noqa: BLE001  (whatever went wrong is told, with its traceback in the log)
        return _failed(error, record)
    return 0


def _as_rank(request: Request, rank: int, folder: Path) -> Request:
    shared = replace(request, checkpoint_dir=str(folder_of(request)))
    if rank == 0:
        return shared
    own = folder / f"rank-{rank}"
    own.mkdir()
    return replace(shared, output_dir=str(own))


def _run(request: Request, emitter: Emitter) -> dict[str, Any]:
    from executors.cache import hold_inputs
    from executors.modeling.libraries import prepare_libraries
    from executors.registry import find

    prepare_libraries()
    with loading():
        import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    hold_inputs(request)
    result = find(request.task_type).run(request, emitter)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def _failed(error: Exception, record: Path) -> int:
    import traceback

    from executors.failures import classify

    try:
        cancellation.check()
        traceback.print_exception(error)
        cancellation.ignore()
    except cancellation.Cancelled:
        write_record(record, None, stopped=True)
        return CANCELLED
    write_record(record, plain(classify(error)), from_peer=is_from_peer(error))
    return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads of a failed backend that still wait for the other ranks would hold up the usual end.
    os._exit(code)
