"""What `gpuflow doctor` says about the lock directory, which keeps workers of one machine from each other's GPUs.

Called by `cli.checks`. Each check looks at one thing and says how to mend it; none raises. They leave the directory
behind, which a worker would make too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuflow.cli.checks import Check
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

_NAME: Final = "lock directory"
_FILE: Final = "doctor.lock"
_MEND: Final = "set GPUFLOW_LOCK_DIR to a folder on a local disk that every worker of this machine shares"
_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "9p", "ncpfs"}
)
#: Exit code 3: another process could take the lock that this one holds.
_TRY_LOCK: Final = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(0)
sys.exit(3)
"""


def lock_directory(settings: Settings) -> list[Check]:
    """Check the lock directory where there is a GPU, or where one is set."""
    from gpuflow.fleet.hardware import probe

    if settings.lock_dir is None and not probe(None).gpus:
        return []
    if sys.platform == "win32":
        return [Check(name=_NAME, status="fail", detail="GPUs are shared on Linux and macOS alone")]
    from gpuflow.fleet.gpu_directory import LockDirectory, default_directory, unlock

    path = settings.lock_dir or default_directory()
    try:
        directory = LockDirectory(path)
    except GPUFlowError as error:
        return [Check(name=_NAME, status="fail", detail=str(error), mend=_MEND)]
    try:
        kind = file_system(path)
        if kind in _NETWORK or kind.startswith("fuse"):
            detail = f"{path} is on a network file system ({kind}), whose locks do not hold"
            return [Check(name=_NAME, status="fail", detail=detail, mend=_MEND)]
        made = directory.lock(_FILE)
        if made is None:
            return [Check(name=_NAME, status="ok", detail=f"{path} ({kind}): checked by another process right now")]
        try:
            tried = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path / _FILE)],
                capture_output=True,
                timeout=30,
                check=False,
            )
        finally:
            unlock(made)
    except (GPUFlowError, OSError, subprocess.TimeoutExpired) as error:
        return [Check(name=_NAME, status="fail", detail=str(error), mend=_MEND)]
    finally:
        directory.close()
    if tried.returncode:
        detail = f"{path} ({kind}): a lock does not keep another process out"
        return [Check(name=_NAME, status="fail", detail=detail, mend=_MEND)]
    if kind == "overlay":
        detail = f"{path} lies in a container's own file system: the host and other containers do not see it"
        mend = "mount one folder of the host into every container of this machine, and name it by GPUFLOW_LOCK_DIR"
        return [Check(name=_NAME, status="warn", detail=detail, mend=mend)]
    return [Check(name=_NAME, status="ok", detail=f"{path} ({kind}): locks hold between processes")]


def shared_by_all(workers: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Check]:
    """Check that all workers of a machine use one directory: (id, load) of each live worker, by what it wrote."""
    machines: dict[str, dict[str, list[str]]] = {}
    for worker_id, load in workers:
        locks = load.get("locks")
        if isinstance(locks, Mapping) and locks.get("machine"):
            found = machines.setdefault(str(locks["machine"]), {})
            where = f"{locks.get('path')} ({locks.get('directory')})"
            found.setdefault(where, []).append(worker_id)
    return [
        Check(
            name=_NAME,
            status="fail",
            detail="workers of one machine use different lock directories, so two tasks may get one GPU: "
            + "; ".join(f"{where}: {', '.join(sorted(ids))}" for where, ids in sorted(directories.items())),
            mend="mount one folder into all of them and set GPUFLOW_LOCK_DIR to it, then restart them",
        )
        for directories in machines.values()
        if len(directories) > 1
    ]


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds `path`; "unknown" where the system does not tell."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return "unknown"
    real, best, kind = path.resolve(), -1, "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind
