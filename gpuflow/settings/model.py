"""The settings themselves, as one frozen model, and `Settings.load()`, which reads them.

Anyone may import `Settings` (through `gpuflow.settings`). It knows neither Celery nor Redis: it judges a value
by its own form alone and connects to nothing.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic.config import JsonDict

from gpuflow.errors import InvalidSettings
from gpuflow.settings import sources
from gpuflow.settings.flower_roles import ROLES, roles_by_user


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where one setting's value comes from; secrets in `value_masked` are replaced by ***."""

    name: str
    env_name: str
    value_masked: str
    source: str


def _split(value: Any) -> Any:
    """Turn `a, b` into ("a", "b"); lists pass through."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _split_some(value: Any) -> Any:
    """Split as `_split`; a text that holds nothing but commas is a mistake."""
    parts = _split(value)
    if isinstance(value, str) and not parts:
        raise ValueError("it names nobody")
    return parts


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
#: A duration in seconds, above zero.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: What an hour of a machine may cost at most: more is a mistake, and would not fit the counters.
MOST_COST: Final = 1e6
Cost = Annotated[float, Field(ge=0, le=MOST_COST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]

#: What GPUFLOW_ALLOW_CODE may name (`gpuflow.policy.code`); `all` is all of them, `none` says none expressly.
CODE_KINDS: Final = ("command", "pickles", "plugins", "project", "remote-code", "all", "none")


def _setting(env_name: str, default: Any, hint: str, *, secret: bool = False) -> Any:
    """Declare a setting: `hint` completes the sentence "give ..." in an error."""
    extra: JsonDict = {"env_name": env_name, "secret": secret}
    return Field(default=default, description=hint, json_schema_extra=extra, validate_default=True)


#: The settings whose value is a path.
_FOLDERS: Final = (
    "results_dir", "cache_dir", "state_dir", "env_dir", "secrets_dir", "valkey_server", "lock_dir", "container_presets",
    "audit_key_file", "cgroup", "signing_key_file",
)  # fmt: skip


class Settings(BaseModel):
    """All settings. `Settings()` holds the defaults; `Settings.load()` reads environment and file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    redis_url: str | None = _setting("REDIS_URL", None, "a URL such as redis://host:6379/0", secret=True)
    results_dir: Path = _setting("RESULTS_DIR", "./results_workers", "a folder")
    task_topic: str = _setting("TASK_TOPIC", "tasks", "a queue name without commas or spaces")
    heartbeat_interval_seconds: Seconds = _setting("HEARTBEAT_INTERVAL_SEC", 30, "seconds, such as 30")
    heartbeat_timeout_seconds: Seconds = _setting("HEARTBEAT_TIMEOUT_SEC", 120, "seconds, such as 120")
    worker_id: str | None = _setting("WORKER_ID", None, "a name of letters, digits, '.', '_' and '-'")
    worker_tags: Names = _setting("WORKER_TAGS", (), "tags separated by commas, such as fast,nvlink")
    log_level: LogLevel = _setting("LOG_LEVEL", "INFO", "DEBUG, INFO, WARNING, ERROR or CRITICAL")
    log_format: Literal["text", "json"] = _setting("LOG_FORMAT", "text", "text or json")
    traces: Literal["none", "otlp"] = _setting("GPUFLOW_TRACES", "none", "none or otlp")
    orchestrator_base_url: str | None = _setting("ORCHESTRATOR_BASE_URL", None, "a URL such as https://host")
    worker_network_bandwidth_bytes_per_second: PositiveCount | None = _setting(
        "WORKER_NETWORK_BANDWIDTH_BYTES_PER_SEC", None, "bytes per second, such as 125000000"
    )
    enable_task_merge: bool = _setting("ENABLE_TASK_MERGE", True, "true or false")
    task_merge_max_batch_size: PositiveCount = _setting("TASK_MERGE_MAX_BATCH_SIZE", 4, "a count from 1 up")
    task_merge_max_batch_tokens: PositiveCount = _setting(
        "TASK_MERGE_MAX_BATCH_TOKENS", 16_384, "a count of tokens, such as 16384"
    )
    merge_across_owners: bool = _setting("GPUFLOW_MERGE_ACROSS_OWNERS", False, "true or false")
    merge_max_results: PositiveCount = _setting("GPUFLOW_MERGE_MAX_RESULTS", 10_000, "a count from 1 up")
    merge_max_result_bytes: Annotated[ByteSize, Field(gt=0)] = _setting(
        "GPUFLOW_MERGE_MAX_RESULT_BYTES", "256MiB", "a size such as 256MiB, or bytes"
    )
    enable_elastic_scaling: bool = _setting("ENABLE_ELASTIC_SCALING", True, "true or false")
    elastic_auto_disable_idle_seconds: Seconds = _setting("ELASTIC_AUTO_DISABLE_IDLE_SEC", 60, "seconds, such as 60")
    elastic_auto_enable_queue_threshold: Count = _setting(
        "ELASTIC_AUTO_ENABLE_QUEUE_THRESHOLD", 5, "a count of queued tasks"
    )
    elastic_auto_disable_queue_max: Count = _setting("ELASTIC_AUTO_DISABLE_QUEUE_MAX", 2, "a count of queued tasks")
    elastic_auto_min_active_workers: Count = _setting("ELASTIC_AUTO_MIN_ACTIVE_WORKERS", 1, "a count of workers")
    elastic_auto_poll_interval_seconds: Seconds = _setting("ELASTIC_AUTO_POLL_INTERVAL_SEC", 30, "seconds, such as 30")
    elastic_auto_toggle_cooldown_seconds: Seconds = _setting(
        "ELASTIC_AUTO_TOGGLE_COOLDOWN_SEC", 60, "seconds, such as 60"
    )
    scaling_policy: str | None = _setting(
        "GPUFLOW_SCALING_POLICY", None, "the path of a scaling policy, or a preset such as local"
    )
    cost_per_hour: Cost = _setting("GPUFLOW_COST_PER_HOUR", 0.0, "what an hour of this machine costs, such as 2.5")
    lease_seconds: Seconds = _setting("GPUFLOW_LEASE_SEC", 60, "seconds, such as 60")
    key_prefix: str = _setting("GPUFLOW_KEY_PREFIX", "", "letters, digits, '.', '_', '-' and ':'")
    worker_token: SecretStr | None = _setting("GPUFLOW_WORKER_TOKEN", None, "a worker token", secret=True)
    gateway_url: str | None = _setting("GPUFLOW_GATEWAY_URL", None, "a URL such as https://host:8080")
    store_url: str | None = _setting(
        "GPUFLOW_STORE_URL", None, "file:///shared/folder, https://host/api/v1/results or s3://bucket/prefix"
    )
    flower_read_only: bool = _setting("GPUFLOW_FLOWER_READ_ONLY", False, "true or false")
    flower_roles: Annotated[tuple[str, ...], BeforeValidator(_split_some)] = _setting(
        "GPUFLOW_FLOWER_ROLES",
        (),
        f"user=role by commas, with the roles {' and '.join(ROLES)}, such as ana=operator,ben=viewer,*=viewer",
    )
    gateway_max_file_bytes: PositiveCount = _setting(
        "GPUFLOW_GATEWAY_MAX_FILE_BYTES", 512 * 1024**3, "bytes, such as 549755813888"
    )
    download_max_bytes: Annotated[ByteSize, Field(gt=0)] = _setting(
        "GPUFLOW_DOWNLOAD_MAX_BYTES", "512GiB", "a size such as 100GiB, or bytes"
    )
    gateway_max_uploads: PositiveCount = _setting("GPUFLOW_GATEWAY_MAX_UPLOADS", 256, "a count from 1 up")
    gateway_max_connections: PositiveCount = _setting("GPUFLOW_GATEWAY_MAX_CONNECTIONS", 2048, "a count from 1 up")
    gateway_max_connections_per_address: PositiveCount = _setting(
        "GPUFLOW_GATEWAY_MAX_CONNECTIONS_PER_ADDRESS", 512, "a count from 1 up"
    )
    trusted_proxies: Names = _setting(
        "GPUFLOW_TRUSTED_PROXIES", (), "addresses or networks separated by commas, such as 10.0.0.7, 192.168.1.0/24"
    )
    gateway_max_streams: PositiveCount = _setting("GPUFLOW_GATEWAY_MAX_STREAMS", 2000, "a count from 1 up")
    gateway_functions: Names = _setting(
        "GPUFLOW_GATEWAY_FUNCTIONS", (), "names of functions separated by commas, such as my_team.jobs.*; * for all"
    )
    served_models: Names = _setting(
        "GPUFLOW_SERVED_MODELS", (), "models separated by commas: name=preset, name=hub/id or name=/path on the workers"
    )
    retention_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _setting(
        "GPUFLOW_RETENTION_DAYS", 30, "days, such as 30"
    )
    audit_retention_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _setting(
        "GPUFLOW_AUDIT_RETENTION_DAYS", 30, "days, such as 30"
    )
    audit_max_entries: PositiveCount = _setting("GPUFLOW_AUDIT_MAX_ENTRIES", 1_000_000, "a count from 1 up")
    audit_key_file: Path | None = _setting("GPUFLOW_AUDIT_KEY_FILE", None, "the path of a file with the key")
    signing: Literal["off", "sign", "require"] = _setting("GPUFLOW_SIGNING", "off", "off, sign or require")
    signing_key_file: Path | None = _setting(
        "GPUFLOW_SIGNING_KEY_FILE", None, "the path of a file with a key of at least 32 bytes, or several, one a line"
    )
    signature_days: Annotated[float, Field(gt=0, le=3650, allow_inf_nan=False)] = _setting(
        "GPUFLOW_SIGNATURE_DAYS", 30, "days, such as 30"
    )
    pass_env: Names = _setting(
        "GPUFLOW_PASS_ENV", (), "names of environment variables separated by commas; globs are allowed"
    )
    allow_volatile: bool = _setting("GPUFLOW_ALLOW_VOLATILE", False, "true or false")
    cache_dir: Path = _setting("GPUFLOW_CACHE_DIR", "~/.cache/gpuflow", "a folder")
    model_cache_max_bytes: Annotated[ByteSize, Field(gt=0)] | None = _setting(
        "GPUFLOW_MODEL_CACHE_MAX_BYTES", None, "a size such as 200GB, or bytes"
    )
    disk_floor_bytes: Annotated[ByteSize, Field(ge=0)] = _setting(
        "GPUFLOW_DISK_FLOOR_BYTES", "1GiB", "a size such as 1GiB, or bytes; 0 for none"
    )
    state_dir: Path = _setting("GPUFLOW_STATE_DIR", "~/.local/state/gpuflow", "a folder")
    env_dir: Path = _setting("GPUFLOW_ENV_DIR", "~/.local/share/gpuflow/environments", "a folder on a local disk")
    grace_seconds: Seconds = _setting("GPUFLOW_GRACE_SEC", 10, "seconds from SIGTERM to SIGKILL, such as 10")
    prepare_seconds: Seconds = _setting(
        "GPUFLOW_PREPARE_SEC", 3600, "seconds that an attempt may take to fetch what it reads, such as 3600"
    )
    notice_seconds: Seconds = _setting("GPUFLOW_NOTICE_SEC", 30, "seconds a preempted task has to save its state")
    spot_notices: Literal["none", "aws"] = _setting("GPUFLOW_SPOT_NOTICES", "none", "none or aws")
    spot_metadata_url: str = _setting(
        "GPUFLOW_SPOT_METADATA_URL", "http://169.254.169.254", "a URL such as http://169.254.169.254"
    )
    submit_timeout_seconds: SecondsOrNone = _setting(
        "GPUFLOW_SUBMIT_TIMEOUT_SEC",
        30,
        "seconds that commands wait for a broker that is away, such as 30, or 0",
    )
    events_maxlen: PositiveCount = _setting("GPUFLOW_EVENTS_MAXLEN", 10_000, "a count of events a task keeps")
    events_max_bytes: Annotated[ByteSize, Field(ge=65_536)] = _setting(
        "GPUFLOW_EVENTS_MAX_BYTES", "16MiB", "a size such as 16MiB, or bytes, from 64KiB up"
    )
    secrets_dir: Path | None = _setting("GPUFLOW_SECRETS_DIR", None, "a folder that holds one file for each secret")
    offline: bool = _setting("GPUFLOW_OFFLINE", False, "true or false")
    fallback_seconds: Seconds = _setting("GPUFLOW_FALLBACK_SEC", 60.0, "seconds, such as 60")
    model_patience_seconds: Duration = _setting(
        "GPUFLOW_MODEL_PATIENCE_SEC", 2.0, "seconds that a task is left to a worker that has its model"
    )
    session_idle_seconds: Duration = _setting(
        "GPUFLOW_SESSION_IDLE_SEC", 300.0, "seconds that a model stays loaded without work; 0: not at all"
    )
    read_roots: Names = _setting("GPUFLOW_READ_ROOTS", (), "absolute paths of folders, separated by commas")
    write_roots: Names = _setting("GPUFLOW_WRITE_ROOTS", (), "absolute paths of folders, separated by commas")
    allow_hosts: Names = _setting(
        "GPUFLOW_ALLOW_HOSTS", (), "names, globs and networks by commas, such as db.internal,*.lab,10.1.0.0/16"
    )
    allow_buckets: Names = _setting(
        "GPUFLOW_ALLOW_BUCKETS",
        (),
        "buckets and bucket/prefix by commas, globs are allowed, such as models,data/2026-*",
    )
    lock_dir: Path | None = _setting(
        "GPUFLOW_LOCK_DIR", None, "a folder on a local disk that every worker of the machine shares"
    )
    executors: Names = _setting(
        "GPUFLOW_EXECUTORS", (), "owner.name=module:Class or owner.name=/path/file.py:Class, separated by commas"
    )
    container_engine: str = _setting(
        "GPUFLOW_CONTAINER_ENGINE", "auto", "auto, none, or the socket of an engine such as unix:///run/docker.sock"
    )
    container_images: Names = _setting(
        "GPUFLOW_CONTAINER_IMAGES", (), "images separated by commas, such as ghcr.io/acme/*; * for all"
    )
    container_mounts: Names = _setting("GPUFLOW_CONTAINER_MOUNTS", (), "absolute paths of folders, separated by commas")
    container_presets: Path | None = _setting("GPUFLOW_CONTAINER_PRESETS", None, "a folder of container presets")
    allow_code: Names = _setting(
        "GPUFLOW_ALLOW_CODE", (), "kinds of code that tasks may bring, separated by commas: " + ", ".join(CODE_KINDS)
    )
    allow_secrets: Names = _setting(
        "GPUFLOW_ALLOW_SECRETS", (), "names of variables that tasks may have as secrets, by commas; globs are allowed"
    )
    valkey_server: Path | None = _setting("GPUFLOW_VALKEY_SERVER", None, "the path of a valkey-server")
    umask: Annotated[str, Field(pattern=r"^0?0[0-7]{2}$")] = _setting(
        "GPUFLOW_UMASK", "077", "an octal number that leaves the owner all rights, such as 077 or 027"
    )
    child_user: str | None = _setting("GPUFLOW_CHILD_USER", None, "the name of a user of this machine")
    child_max_processes: PositiveCount | None = _setting("GPUFLOW_CHILD_MAX_PROCESSES", None, "a count, such as 4096")
    child_max_file_bytes: Annotated[ByteSize, Field(gt=0)] | None = _setting(
        "GPUFLOW_CHILD_MAX_FILE_BYTES", None, "a size such as 100GiB, or bytes"
    )
    child_max_log_bytes: Annotated[ByteSize, Field(ge=65_536)] = _setting(
        "GPUFLOW_CHILD_MAX_LOG_BYTES", "1GiB", "a size such as 1GiB, or bytes, from 64KiB up"
    )
    child_max_memory: Annotated[ByteSize, Field(gt=0)] | None = _setting(
        "GPUFLOW_CHILD_MAX_MEMORY", None, "a size such as 64GiB, or bytes"
    )
    task_limits: Literal["auto", "cgroup", "address-space", "none"] = _setting(
        "GPUFLOW_TASK_LIMITS", "auto", "auto, cgroup, address-space or none"
    )
    cgroup: Path | None = _setting("GPUFLOW_CGROUP", None, "a folder below /sys/fs/cgroup that the worker may write to")
    isolate: Literal["none", "bubblewrap"] = _setting("GPUFLOW_ISOLATE", "none", "none or bubblewrap")
    isolate_network: bool = _setting("GPUFLOW_ISOLATE_NETWORK", True, "true or false")
    isolate_cache: Literal["rw", "ro"] = _setting("GPUFLOW_ISOLATE_CACHE", "rw", "rw or ro")
    isolate_folders: Names = _setting(
        "GPUFLOW_ISOLATE_FOLDERS", (), "absolute paths separated by commas, such as /data,/scratch:rw"
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator(*_FOLDERS, mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        if value is None or value.startswith(("redis://", "rediss://")):
            return value
        if not value.startswith(("unix://", "redis+socket://")):
            raise ValueError("the URL must start with redis://, rediss:// or unix://")
        return sources.unix_socket_url(value)

    @field_validator("orchestrator_base_url", "gateway_url")
    @classmethod
    def _http_scheme(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")):
            raise ValueError("the URL must start with http:// or https://")
        return value.rstrip("/")

    @field_validator("container_engine")
    @classmethod
    def _container_engine(cls, value: str) -> str:
        if value.lower() in ("auto", "none"):
            return value.lower()
        if not value.startswith("unix:///"):
            raise ValueError("an engine is named by the URL of its Unix socket")
        return value

    @field_validator("allow_code")
    @classmethod
    def _known_code(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        kinds = tuple(kind.lower() for kind in value)
        unknown = [kind for kind in kinds if kind not in CODE_KINDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no kind of code")
        if "none" in kinds and len(set(kinds)) > 1:
            raise ValueError("it allows none and something; keep one of them")
        return kinds

    @field_validator("container_mounts", "read_roots", "write_roots")
    @classmethod
    def _absolute_roots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        bad = [root for root in value if not root.startswith("/") or root.strip("/") == ""]
        if bad:
            raise ValueError(f"{bad[0]!r} is no absolute path below /")
        return value

    @field_validator("flower_roles")
    @classmethod
    def _roles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        roles_by_user(value)
        return value

    @field_validator("allow_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            sources.check_host(entry)
        return value

    @field_validator("allow_buckets")
    @classmethod
    def _buckets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        bad = [entry for entry in value if "://" in entry or entry.startswith("/")]
        if bad:
            raise ValueError(f"{bad[0]!r} is no bucket, or bucket/prefix; no URL is given here")
        return value

    @field_validator("isolate_folders")
    @classmethod
    def _absolute_folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        bad = [root for root in value if not root.startswith("/") or root.removesuffix(":rw").strip("/") == ""]
        if bad:
            raise ValueError(f"{bad[0]!r} is no absolute path below /")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            network = ipaddress.ip_network(each)
            if network.prefixlen == 0:
                raise ValueError(f"{each} is every address; name the proxies")
        return value

    @field_validator("store_url")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        return None if value is None else sources.store_url(value)

    @field_validator("worker_id", mode="before")
    @classmethod
    def _host_named(cls, value: Any) -> Any:
        return value.replace("%H", socket.gethostname()) if isinstance(value, str) else value

    @field_validator("task_topic", "worker_id", "key_prefix")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value and not all(c.isascii() and (c.isalnum() or c in "._-:") for c in value):
            raise ValueError("only letters, digits, '.', '_', '-' and ':' are allowed")
        if value and len(value) > 128:
            raise ValueError("at most 128 characters are allowed")
        return value

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Self:
        """Read all settings: environment over `gpuflow.toml` (or $GPUFLOW_CONFIG) over default.

        A relative path is relative to `cwd`, or to the file's folder when it stands in the file. Raises
        InvalidSettings, one line for each bad value, each with the setting, value, source and mend.
        """
        env = os.environ if env is None else env
        cwd = Path.cwd() if cwd is None else cwd
        names = env_names()
        raw = dict(_default_folders(env, cwd))
        mistakes: list[str] = []
        path = sources.config_file(env, cwd)
        if path is not None:
            found, mistakes = sources.from_file(path, names)
            raw.update(found)
        raw.update(sources.from_environment(env, names, cwd))
        values = {name: _located(name, item, env) for name, item in raw.items()}
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            mistakes.extend(_explain(error, raw))
            raise InvalidSettings("\n".join(mistakes)) from None
        mistakes.extend(settings._contradictions())
        if mistakes:
            raise InvalidSettings("\n".join(mistakes))
        settings._sources.update({name: item.source for name, item in raw.items()})
        return settings

    def is_set(self, name: str) -> bool:
        """Say whether a setting was set by the environment or the file, and is not its default."""
        return not self._sources.get(name, "default").startswith("default")

    @property
    def umask_bits(self) -> int:
        """The umask as a number."""
        return int(self.umask, 8)

    def origins(self) -> list[Origin]:
        """Return every setting with its value (secrets masked) and source, in the order of declaration."""
        return [
            Origin(
                name=name,
                env_name=variable,
                value_masked=_shown(name, getattr(self, name)),
                source=self._sources.get(name, "default"),
            )
            for name, variable in env_names().items()
        ]

    def _contradictions(self) -> Iterator[str]:
        if self.heartbeat_timeout_seconds <= self.heartbeat_interval_seconds:
            yield (
                f"HEARTBEAT_TIMEOUT_SEC ({self.heartbeat_timeout_seconds:g}) must be above "
                f"HEARTBEAT_INTERVAL_SEC ({self.heartbeat_interval_seconds:g}), or every worker counts "
                f"as silent; raise the first or lower the second"
            )
        if self.elastic_auto_disable_queue_max > self.elastic_auto_enable_queue_threshold:
            yield (
                f"ELASTIC_AUTO_DISABLE_QUEUE_MAX ({self.elastic_auto_disable_queue_max}) must not be above "
                f"ELASTIC_AUTO_ENABLE_QUEUE_THRESHOLD ({self.elastic_auto_enable_queue_threshold}), or "
                f"workers would switch on and off for ever; lower the first"
            )
        if self.signing != "off" and self.signing_key_file is None:
            yield (
                f"GPUFLOW_SIGNING is {self.signing}, and GPUFLOW_SIGNING_KEY_FILE names no key; make one by "
                "`openssl rand -hex 32 > FILE; chmod 600 FILE`, or set GPUFLOW_SIGNING=off"
            )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            yield name, _shown(name, value) if _is_secret(name) and value is not None else value


def env_names() -> dict[str, str]:
    """Return the environment variable of every setting, by setting name, in the order of declaration."""
    return {name: _extra(name)["env_name"] for name in Settings.model_fields}


def _extra(name: str) -> dict[str, Any]:
    extra = Settings.model_fields[name].json_schema_extra
    return extra if isinstance(extra, dict) else {}


def _is_secret(name: str) -> bool:
    return bool(_extra(name).get("secret"))


def _shown(name: str, value: Any) -> str:
    """Return a value as text for people, without its secrets."""
    if value is None:
        return ""
    if name.endswith("_url"):
        return sources.mask_url(str(value))
    if _is_secret(name):
        return sources.MASK
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _default_folders(env: Mapping[str, str], cwd: Path) -> Iterator[tuple[str, sources.RawValue]]:
    """Yield the folders whose default depends on the environment: the XDG base directories, and the home."""
    for name, variable, fallback, below in (
        ("cache_dir", "XDG_CACHE_HOME", "~/.cache", "gpuflow"),
        ("state_dir", "XDG_STATE_HOME", "~/.local/state", "gpuflow"),
        ("env_dir", "XDG_DATA_HOME", "~/.local/share", "gpuflow/environments"),
    ):
        base = env.get(variable, "")
        absolute = Path(base).is_absolute()  # the XDG specification: a relative path is to be ignored
        source = f"default, under {variable}" if absolute else "default"
        yield (
            name,
            sources.RawValue(value=f"{base if absolute else fallback}/{below}", source=source, folder=cwd),
        )
    yield "results_dir", sources.RawValue(value="./results_workers", source="default", folder=cwd)


def _located(name: str, item: sources.RawValue, env: Mapping[str, str]) -> Any:
    """Return the value to validate: a path made absolute by the folder of its source."""
    if name == "executors":
        return sources.executor_places(item)
    if name not in _FOLDERS or not isinstance(item.value, str):
        return item.value
    text = item.value
    home = env.get("HOME", "")
    if home and (text == "~" or text.startswith("~/")):
        text = home + text[1:]
    return item.folder / Path(text).expanduser()


def _explain(error: ValidationError, raw: Mapping[str, sources.RawValue]) -> Iterator[str]:
    """Turn pydantic's report into one line for each bad setting."""
    seen: set[str] = set()
    for mistake in error.errors(include_url=False, include_input=False):
        name = str(mistake["loc"][0]) if mistake["loc"] else ""
        if name in seen or name not in raw:
            continue
        seen.add(name)
        item = raw[name]
        if name.endswith("_url") and isinstance(item.value, str) and "://" in item.value:
            shown = repr(sources.mask_url(item.value))
        elif not _is_secret(name):
            shown = repr(item.value)
        else:
            shown = sources.MASK
        cause = mistake["msg"].removeprefix("Value error, ")
        hint = Settings.model_fields[name].description
        yield f"{_extra(name)['env_name']} is {shown} (from {item.source}): {cause}; give {hint}"
