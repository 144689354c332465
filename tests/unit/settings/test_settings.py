"""Settings: where a value comes from, what a bad one says, and that secrets stay hidden."""

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuflow.errors import InvalidSettings
from gpuflow.settings import Settings, mask_url
from gpuflow.settings.model import env_names

DOCUMENTED = {
    "REDIS_URL": None,
    "TASK_TOPIC": "tasks",
    "HEARTBEAT_INTERVAL_SEC": 30,
    "HEARTBEAT_TIMEOUT_SEC": 120,
    "WORKER_ID": None,
    "WORKER_TAGS": (),
    "LOG_LEVEL": "INFO",
    "LOG_FORMAT": "text",
    "GPUFLOW_TRACES": "none",
    "ORCHESTRATOR_BASE_URL": None,
    "WORKER_NETWORK_BANDWIDTH_BYTES_PER_SEC": None,
    "ENABLE_TASK_MERGE": True,
    "TASK_MERGE_MAX_BATCH_SIZE": 4,
    "TASK_MERGE_MAX_BATCH_TOKENS": 16_384,
    "GPUFLOW_MERGE_ACROSS_OWNERS": False,
    "GPUFLOW_MERGE_MAX_RESULTS": 10_000,
    "GPUFLOW_MERGE_MAX_RESULT_BYTES": 256 << 20,
    "ENABLE_ELASTIC_SCALING": True,
    "ELASTIC_AUTO_DISABLE_IDLE_SEC": 60,
    "ELASTIC_AUTO_ENABLE_QUEUE_THRESHOLD": 5,
    "ELASTIC_AUTO_DISABLE_QUEUE_MAX": 2,
    "ELASTIC_AUTO_MIN_ACTIVE_WORKERS": 1,
    "ELASTIC_AUTO_POLL_INTERVAL_SEC": 30,
    "ELASTIC_AUTO_TOGGLE_COOLDOWN_SEC": 60,
    "GPUFLOW_COST_PER_HOUR": 0,
    "GPUFLOW_SCALING_POLICY": None,
    "GPUFLOW_LEASE_SEC": 60,
    "GPUFLOW_KEY_PREFIX": "",
    "GPUFLOW_WORKER_TOKEN": None,
    "GPUFLOW_GATEWAY_URL": None,
    "GPUFLOW_DOWNLOAD_MAX_BYTES": 549_755_813_888,
    "GPUFLOW_FLOWER_READ_ONLY": False,
    "GPUFLOW_FLOWER_ROLES": (),
    "GPUFLOW_GATEWAY_MAX_FILE_BYTES": 549_755_813_888,
    "GPUFLOW_GATEWAY_FUNCTIONS": (),
    "GPUFLOW_GATEWAY_MAX_UPLOADS": 256,
    "GPUFLOW_GATEWAY_MAX_STREAMS": 2000,
    "GPUFLOW_SERVED_MODELS": (),
    "GPUFLOW_STORE_URL": None,
    "GPUFLOW_RETENTION_DAYS": 30,
    "GPUFLOW_AUDIT_RETENTION_DAYS": 30,
    "GPUFLOW_AUDIT_MAX_ENTRIES": 1_000_000,
    "GPUFLOW_AUDIT_KEY_FILE": None,
    "GPUFLOW_SIGNING": "off",
    "GPUFLOW_SIGNING_KEY_FILE": None,
    "GPUFLOW_SIGNATURE_DAYS": 30,
    "GPUFLOW_PASS_ENV": (),
    "GPUFLOW_EXECUTORS": (),
    "GPUFLOW_ALLOW_VOLATILE": False,
    "GPUFLOW_GRACE_SEC": 10,
    "GPUFLOW_SPOT_NOTICES": "none",
    "GPUFLOW_SPOT_METADATA_URL": "http://169.254.169.254",
    "GPUFLOW_NOTICE_SEC": 30,
    "GPUFLOW_PREPARE_SEC": 3600,
    "GPUFLOW_DISK_FLOOR_BYTES": 2**30,
    "GPUFLOW_SUBMIT_TIMEOUT_SEC": 30,
    "GPUFLOW_EVENTS_MAXLEN": 10_000,
    "GPUFLOW_CONTAINER_ENGINE": "auto",
    "GPUFLOW_CONTAINER_IMAGES": (),
    "GPUFLOW_CONTAINER_MOUNTS": (),
    "GPUFLOW_READ_ROOTS": (),
    "GPUFLOW_WRITE_ROOTS": (),
    "GPUFLOW_ALLOW_HOSTS": (),
    "GPUFLOW_ALLOW_BUCKETS": (),
    "GPUFLOW_CONTAINER_PRESETS": None,
    "GPUFLOW_EVENTS_MAX_BYTES": 16 << 20,
    "GPUFLOW_GATEWAY_MAX_CONNECTIONS": 2048,
    "GPUFLOW_GATEWAY_MAX_CONNECTIONS_PER_ADDRESS": 512,
    "GPUFLOW_TRUSTED_PROXIES": (),
    "GPUFLOW_VALKEY_SERVER": None,
    "GPUFLOW_ALLOW_CODE": (),
    "GPUFLOW_ALLOW_SECRETS": (),
    "GPUFLOW_SECRETS_DIR": None,
    "GPUFLOW_LOCK_DIR": None,
    "GPUFLOW_UMASK": "077",
    "GPUFLOW_CHILD_USER": None,
    "GPUFLOW_CHILD_MAX_PROCESSES": None,
    "GPUFLOW_CHILD_MAX_FILE_BYTES": None,
    "GPUFLOW_CHILD_MAX_MEMORY": None,
    "GPUFLOW_CHILD_MAX_LOG_BYTES": 1024**3,
    "GPUFLOW_TASK_LIMITS": "auto",
    "GPUFLOW_CGROUP": None,
    "GPUFLOW_ISOLATE": "none",
    "GPUFLOW_ISOLATE_NETWORK": True,
    "GPUFLOW_ISOLATE_CACHE": "rw",
    "GPUFLOW_ISOLATE_FOLDERS": (),
    "GPUFLOW_OFFLINE": False,
    "GPUFLOW_MODEL_CACHE_MAX_BYTES": None,
    "GPUFLOW_FALLBACK_SEC": 60.0,
    "GPUFLOW_MODEL_PATIENCE_SEC": 2.0,
    "GPUFLOW_SESSION_IDLE_SEC": 300.0,
}


@pytest.fixture
def load(tmp_path):
    """Return a function: environment and content of gpuflow.toml -> Settings."""

    def run(toml=None, **env):
        if toml is not None:
            (tmp_path / "gpuflow.toml").write_text(toml)
        return Settings.load({"HOME": "/home/ana", **env}, tmp_path)

    return run


def test_defaults_are_those_of_the_documentation(load, tmp_path):
    settings = load()
    by_variable = {variable: getattr(settings, name) for name, variable in env_names().items()}
    assert {key: by_variable[key] for key in DOCUMENTED} == DOCUMENTED
    assert settings.results_dir == tmp_path / "results_workers"
    assert settings.cache_dir == Path("/home/ana/.cache/gpuflow")
    assert settings.state_dir == Path("/home/ana/.local/state/gpuflow")
    assert set(by_variable) - set(DOCUMENTED) == {
        "RESULTS_DIR",
        "GPUFLOW_CACHE_DIR",
        "GPUFLOW_STATE_DIR",
        "GPUFLOW_ENV_DIR",
    }


def test_environment_over_file_over_default(load):
    settings = load("lease_seconds = 20\nTASK_TOPIC = 'mine'\n", GPUFLOW_LEASE_SEC="5.5")
    assert (settings.lease_seconds, settings.task_topic, settings.grace_seconds) == (5.5, "mine", 10)
    sources = {origin.env_name: origin.source for origin in settings.origins()}
    assert sources["GPUFLOW_LEASE_SEC"] == "environment variable GPUFLOW_LEASE_SEC"
    assert sources["TASK_TOPIC"] == "gpuflow.toml:2"
    assert sources["GPUFLOW_GRACE_SEC"] == "default"


def test_an_empty_variable_is_unset(load):
    settings = load("task_topic = 'mine'", TASK_TOPIC="", GPUFLOW_ALLOW_VOLATILE="", REDIS_URL="  ")
    assert (settings.task_topic, settings.allow_volatile, settings.redis_url) == ("mine", False, None)


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("true", True), ("no", False), ("OFF", False)])
def test_booleans(load, text, expected):
    assert load(ENABLE_TASK_MERGE=text).enable_task_merge is expected


def test_lists_from_commas_and_from_the_file(load):
    settings = load('worker_tags = ["a", "b"]\n', GPUFLOW_PASS_ENV="FOO, BAR_*,,")
    assert settings.worker_tags == ("a", "b")
    assert settings.pass_env == ("FOO", "BAR_*")


def test_folders(load, tmp_path):
    other = tmp_path / "etc"
    other.mkdir()
    (other / "flow.toml").write_text("results_dir = 'out'\ncache_dir = '~/c'\n")
    settings = load(GPUFLOW_CONFIG="etc/flow.toml", XDG_STATE_HOME="/state", XDG_CACHE_HOME="relative")
    assert settings.results_dir == other / "out"
    assert settings.cache_dir == Path("/home/ana/c")
    assert settings.state_dir == Path("/state/gpuflow")
    assert load(RESULTS_DIR="r").results_dir == tmp_path / "r"
    assert settings.env_dir == Path("/home/ana/.local/share/gpuflow/environments")
    assert load(XDG_DATA_HOME="/data").env_dir == Path("/data/gpuflow/environments")
    assert load(GPUFLOW_ENV_DIR="e").env_dir == tmp_path / "e"


def test_a_worker_may_be_named_after_its_host(load, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "box-7.lab")
    assert load(WORKER_ID="%H").worker_id == "box-7.lab"
    assert load(WORKER_ID="gpu-%H").worker_id == "gpu-box-7.lab"
    assert load().worker_id is None


@pytest.mark.parametrize(
    ("variable", "value", "fragments"),
    [
        ("GPUFLOW_LEASE_SEC", "abc", ["'abc'", "seconds, such as 60"]),
        ("GPUFLOW_LEASE_SEC", "0", ["greater than 0"]),
        ("GPUFLOW_LEASE_SEC", "nan", ["finite"]),
        ("GPUFLOW_LEASE_SEC", "inf", ["finite"]),
        ("GPUFLOW_COST_PER_HOUR", "1e7", ["less than or equal to 1000000"]),
        ("TASK_MERGE_MAX_BATCH_SIZE", "0", ["greater than or equal to 1"]),
        ("TASK_MERGE_MAX_BATCH_SIZE", "2.5", ["integer"]),
        ("ENABLE_TASK_MERGE", "perhaps", ["true or false"]),
        ("LOG_LEVEL", "loud", ["DEBUG, INFO"]),
        ("REDIS_URL", "localhost:6379", ["redis://"]),
        ("GPUFLOW_GATEWAY_URL", "host", ["https://"]),
        ("GPUFLOW_STORE_URL", "/shared", ["file:///"]),
        ("GPUFLOW_STORE_URL", "ftp://host/x", ["s3://"]),
        ("GPUFLOW_STORE_URL", "file://other/x", ["absolute path"]),
        ("TASK_TOPIC", "a,b", ["only letters"]),
        ("WORKER_ID", "a b", ["only letters"]),
        ("WORKER_ID", "x" * 200, ["at most 128"]),
        ("GPUFLOW_KEY_PREFIX", "a*", ["only letters"]),
    ],
)
def test_a_bad_value_names_variable_source_and_mend(load, variable, value, fragments):
    with pytest.raises(InvalidSettings) as caught:
        load(**{variable: value})
    message = str(caught.value)
    assert message.startswith(f"{variable} is ")
    assert f"from environment variable {variable}" in message
    assert "\n" not in message
    if variable != "REDIS_URL":
        assert repr(value) in message
    for fragment in fragments:
        assert fragment in message


def test_all_mistakes_are_told_at_once(load):
    toml = (
        "\n\nlease_seconds = 'x'\nlease_secs = 3\nLEASE_SECONDS = 4\ngrace_seconds = 1\n"
        "GPUFLOW_GRACE_SEC = 2\n[redis]\nurl = 1\n"
    )
    with pytest.raises(InvalidSettings) as caught:
        load(toml, TASK_MERGE_MAX_BATCH_SIZE="0")
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert lines[0] == "gpuflow.toml:4: unknown setting 'lease_secs'; did you mean 'lease_seconds'?"
    assert lines[1] == "gpuflow.toml:5: unknown setting 'LEASE_SECONDS'; did you mean 'lease_seconds'?"
    assert "gpuflow.toml:7: 'GPUFLOW_GRACE_SEC' sets grace_seconds again (first at gpuflow.toml:6)" in lines[2]
    assert "gpuflow.toml:8: unknown setting 'redis'" in lines[3]
    assert any("GPUFLOW_LEASE_SEC is 'x' (from gpuflow.toml:3)" in line for line in lines[4:])
    assert any("TASK_MERGE_MAX_BATCH_SIZE is '0'" in line for line in lines[4:])


@pytest.mark.parametrize(
    "env",
    [
        {"HEARTBEAT_INTERVAL_SEC": "200"},
        {"HEARTBEAT_TIMEOUT_SEC": "30"},
        {"ELASTIC_AUTO_DISABLE_QUEUE_MAX": "9"},
    ],
)
def test_settings_that_contradict_each_other(load, env):
    with pytest.raises(InvalidSettings, match=next(iter(env))):
        load(**env)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [(b"a = ", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"lease_seconds = {a = 1}", "GPUFLOW_LEASE_SEC")],
)
def test_a_broken_file_is_named(tmp_path, content, fragment):
    (tmp_path / "gpuflow.toml").write_bytes(content)
    with pytest.raises(InvalidSettings, match=r"gpuflow\.toml") as caught:
        Settings.load({}, tmp_path)
    assert fragment in str(caught.value)


def test_a_named_file_must_be_there(load):
    with pytest.raises(InvalidSettings, match=r"GPUFLOW_CONFIG names 'no\.toml'"):
        load(GPUFLOW_CONFIG="no.toml")


def test_secrets_stay_secret(load):
    secrets = {"REDIS_URL": "redis://user:hunter2@host:6379/0", "GPUFLOW_WORKER_TOKEN": "hunter3"}
    settings = load(**secrets)
    assert settings.redis_url == secrets["REDIS_URL"]
    assert settings.worker_token is not None
    assert settings.worker_token.get_secret_value() == "hunter3"
    shown = f"{settings} {settings!r} {settings.origins()}"
    assert "hunter" not in shown
    assert "redis://user:***@host:6379/0" in shown
    with pytest.raises(InvalidSettings) as caught:
        load(REDIS_URL="amqp://user:hunter2@host", GPUFLOW_LEASE_SEC="x")
    assert "hunter" not in str(caught.value)
    assert "amqp://user:***@host" in str(caught.value)
    with pytest.raises(InvalidSettings) as caught:
        load(REDIS_URL="hunter2")
    assert "hunter" not in str(caught.value)
    with pytest.raises(InvalidSettings) as caught:
        load("GPUFLOW_WORKER_TOKEN = ['hunter3']")
    assert "hunter" not in str(caught.value)


def test_settings_are_frozen(load):
    settings = load()
    with pytest.raises(ValidationError):
        settings.lease_seconds = 1
    assert settings.model_copy(update={"lease_seconds": 1.0}).lease_seconds == 1


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:pw@host", "redis://:***@host"),
        ("redis://pw@host", "redis://***@host"),
        ("redis://u:p@ss@host/1", "redis://u:***@host/1"),
        ("redis://host?password=pw&db=1", "redis://host?password=***&db=1"),
        ("http://[broken", "***"),
    ],
)
def test_masked_urls(url, masked):
    assert mask_url(url) == masked


def test_a_password_in_a_wrong_url_is_not_told(load):
    with pytest.raises(InvalidSettings, match="tokens and keys have settings") as caught:
        load(GPUFLOW_STORE_URL="https://me:canary@host/x")

    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"), [("200GB", 200 * 10**9), ("200GiB", 200 * 2**30), ("1.5 TB", 15 * 10**11), ("4096", 4096)]
)
def test_a_size_is_given_with_its_unit_or_in_bytes(load, text, count):
    assert load(GPUFLOW_MODEL_CACHE_MAX_BYTES=text).model_cache_max_bytes == count
    assert load(toml=f'model_cache_max_bytes = "{text}"').model_cache_max_bytes == count


@pytest.mark.parametrize("text", ["0", "-1", "much", "5 parsecs"])
def test_a_size_that_is_none_is_named(load, text):
    with pytest.raises(InvalidSettings, match=r"GPUFLOW_MODEL_CACHE_MAX_BYTES.*give a size such as 200GB"):
        load(GPUFLOW_MODEL_CACHE_MAX_BYTES=text)


@pytest.mark.parametrize("value", ["proxy.internal", "10.0.0.7/8", "0.0.0.0/0", "::/0"])
def test_a_trusted_proxy_is_an_address_or_a_network(load, value):
    with pytest.raises(InvalidSettings, match="GPUFLOW_TRUSTED_PROXIES"):
        load(GPUFLOW_TRUSTED_PROXIES=value)
    assert load(GPUFLOW_TRUSTED_PROXIES="10.0.0.7, fd00::/8").trusted_proxies == ("10.0.0.7", "fd00::/8")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ana", "'ana' is not of the form user=role"),
        ("=viewer", "'=viewer' is not of the form user=role"),
        ("ana=", "'' is no role"),
        ("ana=admin", "'admin' is no role"),
        ("ana=Viewer", "'Viewer' is no role"),
        ("ana=viewer,ana=operator", "'ana' is named twice"),
        ("ana@x.org=viewer,Ana@X.org=operator", "'Ana@X.org' is named twice"),
        ("*@x.org=operator", "'*@x.org' is no user"),
        ("ana:word=operator", "'ana:word' is no user"),
        (" , ,", "it names nobody"),
    ],
)
def test_a_bad_role_of_a_user_of_flower_is_named(load, text, cause):
    with pytest.raises(InvalidSettings) as caught:
        load(GPUFLOW_FLOWER_ROLES=text)
    assert str(caught.value).startswith("GPUFLOW_FLOWER_ROLES is ")
    assert cause in str(caught.value)
    assert "give user=role by commas, with the roles viewer and operator, such as ana=operator" in str(caught.value)


def test_roles_of_the_users_of_flower(load):
    assert load(GPUFLOW_FLOWER_ROLES="").flower_roles == ()
    entries = ("ana@x.org=operator", "a=b=viewer", "*=viewer")
    assert load(GPUFLOW_FLOWER_ROLES="ana@x.org=operator, a=b=viewer,*=viewer,").flower_roles == entries
    assert load('flower_roles = ["ana@x.org=operator", "a=b=viewer", "*=viewer"]').flower_roles == entries
