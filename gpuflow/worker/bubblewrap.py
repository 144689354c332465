"""The command line of bubblewrap (bwrap(1)), by which a child sees no more of the machine than its own folders. Pure,
but for `check` and `program`, which look at this machine.

A child has a process table, an IPC namespace, a /tmp and a home of its own. It keeps the user that it is started as,
without capabilities.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError

_PROGRAM: Final = "bwrap"
_CHECK_SECONDS: Final = 20.0
#: Programs and libraries of the system.
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
#: Of /etc, what programs need that say who they are, resolve names and check certificates. No keys.
_ETC: Final = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "group", "host.conf", "hosts",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "nvidia", "OpenCL",
    "os-release", "passwd", "pki/ca-trust", "pki/tls/certs", "pki/tls/cert.pem", "protocols", "resolv.conf", "services",
    "ssl/certs", "ssl/openssl.cnf", "timezone", "vulkan",
)  # fmt: skip
#: Inside the sandbox, where nobody else is.
TMP: Final = Path("/tmp")  # noqa: S108
_HOME: Final = TMP / "home"


@cache
def program() -> str | None:
    """Return the path of bwrap, or None."""
    return shutil.which(_PROGRAM)


def check() -> None:
    """Raise GPUFlowError where no sandbox can be made on this machine: why, and what to do."""
    path = program()
    mend = "or set GPUFLOW_ISOLATE=none"
    if path is None:
        raise GPUFlowError(
            f"GPUFLOW_ISOLATE=bubblewrap: bwrap is not installed; run `apt-get install bubblewrap`, {mend}"
        )
    command = [*_start(network=True), "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true"]
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, env={}, timeout=_CHECK_SECONDS
        )
        why = done.stderr.decode("utf-8", "replace").strip()[-300:] if done.returncode else ""
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        why, failed = str(error), True
    if failed:
        raise GPUFlowError(
            f"GPUFLOW_ISOLATE=bubblewrap: {path} makes no sandbox on this machine ({why}); allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
            f"user.max_user_namespaces; in a container its seccomp profile), {mend}"
        )


def own_folders(
    *,
    read: Sequence[Path],
    hidden: Iterable[Path],
    folders: Sequence[tuple[Path, bool]],
    results: Sequence[tuple[Path, bool]],
    locks: Path,
    cwd: Path,
    gpus: bool,
    network: bool,
    roots: Sequence[tuple[Path, bool]] = (),
    view: tuple[Path, Path] | None = None,
) -> tuple[str, ...]:
    """Return what stands before a task's command line: what it sees are folders, each (path, writable).

    A later folder lies over an earlier one. `roots`, `read` and `folders` are the operator's; of those in `hidden`
    nothing is seen through them, unless one of `folders` lies in it. `results` are of the task, in a hidden folder or
    not. `locks` can be written whatever holds it. `view` is a folder, and the place at which it is seen, writable.
    """
    shown = [*read, *(path for path, _ in (*roots, *folders))]
    covered = [
        one for one in hidden if one.is_dir() and any(one != path and one.is_relative_to(path) for path in shown)
    ]
    again = [one for one in folders if any(one[0].is_relative_to(path) for path in covered)]
    return (
        *_start(network=network),
        *_system(),
        *_devices(gpus=gpus),
        *_mounts(roots),
        *_mounts((path, False) for path in read),
        *_mounts(folders),
        *(word for path in covered for word in ("--tmpfs", str(path))),
        *_mounts(again),
        *(() if view is None else ("--bind", str(view[0]), str(view[1]))),
        *_mounts(results),
        *_mounts([(locks, True)]),
        *("--remount-ro", "/"),
        *("--setenv", "HOME", str(_HOME), "--setenv", "TMPDIR", str(TMP)),
        *("--unsetenv", "XDG_CACHE_HOME", "--chdir", str(cwd), "--"),
    )


def whole_disk(*, writable: Iterable[Path], cwd: Path) -> tuple[str, ...]:
    """Return what stands before a program of ours that reads for strangers: it changes these folders alone."""
    return (
        *_start(network=True),
        *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
        *_mounts((path, True) for path in writable),
        *("--chdir", str(cwd), "--"),
    )


def _start(*, network: bool) -> Iterator[str]:
    yield program() or _PROGRAM
    yield from ("--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-cgroup-try", "--cap-drop", "ALL")
    if not network:
        yield "--unshare-net"


def _system() -> Iterator[str]:
    for path in _SYSTEM:
        if Path(path).is_symlink():
            yield from ("--symlink", str(Path(path).readlink()), path)
        else:
            yield from ("--ro-bind-try", path, path)
    for name in _ETC:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--ro-bind-try", "/sys", "/sys", "--proc", "/proc", "--dev", "/dev", "--tmpfs", str(TMP))
    yield from ("--dir", str(_HOME))


def _devices(*, gpus: bool) -> Iterator[str]:
    """Yield the devices of the NVIDIA driver: which of the GPUs the child uses, CUDA_VISIBLE_DEVICES says."""
    for path in sorted(Path("/dev").glob("nvidia*")) if gpus else ():
        yield from ("--dev-bind-try", str(path), str(path))


def _mounts(folders: Iterable[tuple[Path, bool]]) -> Iterator[str]:
    for path, writable in folders:
        yield from ("--bind-try" if writable else "--ro-bind-try", str(path), str(path))
