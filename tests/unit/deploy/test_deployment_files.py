"""The files by which a fleet is deployed: well-formed, consistent with each other, and with what the worker needs."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpuflow.settings import Settings
from gpuflow.settings.model import env_names
from gpuflow.worker.stopping import MARGIN_SECONDS
from gpuflow.worker.systemd import EXTENSION_SECONDS
from tests.unit.metrics.test_dashboards import check

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "tests" / "data" / "compose" / "compose-spec.schema.json"
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text("utf-8")
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MANIFESTS = [
    one
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
]


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8")))


def seconds(duration: str) -> int:
    """Read a duration as Compose writes it."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def soft_shutdown(command: list[str]) -> float:
    """Return the soft shutdown of a worker's command line."""
    (found,) = (word.partition("=")[2] for word in command if word.startswith("worker.soft_shutdown_timeout="))
    return float(found)


def needed(command: list[str]) -> float:
    """Return how long a worker may take from SIGTERM to its end, by its command line and the defaults."""
    settings = Settings()
    return soft_shutdown(command) + settings.notice_seconds + settings.grace_seconds + MARGIN_SECONDS


def validate(content: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(content)


def test_compose_keeps_to_its_specification() -> None:
    validate(compose())
    broken = compose()
    broken["services"]["gateway"]["comand"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)


def test_each_service_is_confined_and_watched() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # A worker that has drained ends with 0 and must not take work again.
        assert service["restart"] == ("on-failure" if name.startswith("worker") else "unless-stopped"), name
        assert "privileged" not in service and service.get("user") != "root", name
        if not {"monitoring", "traces"} & set(service.get("profiles", ())):
            assert service["healthcheck"]["test"], name
            assert seconds(service["stop_grace_period"]) > 0, name
    assert {name for name, one in services.items() if not one.get("profiles")} == {
        "valkey", "gateway", "beat", "flower", "worker-cpu",
    }  # fmt: skip


def test_ports_are_opened_on_loopback_unless_one_says_otherwise() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:"), name


def test_each_variable_is_in_the_example_and_secrets_have_no_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    example = (ROOT / ".env.example").read_text("utf-8")
    named = dict(re.findall(r"^([A-Z_]+)=(.*)$", example, re.MULTILINE))
    assert used == set(named)
    for name in used:
        if name.endswith(("PASSWORD", "TOKEN")):
            assert named[name] == ""
            assert not re.search(rf"\$\{{{name}(?![A-Z_])(?!:\?set it in \.env\}})", text), f"{name} is not required"


def test_traces_are_a_setting_that_all_services_get_and_all_images_have() -> None:
    services = compose()["services"]
    ours = {name: one["environment"] for name, one in services.items() if one["image"].startswith("gpuflow-")}
    assert set(ours) == {"gateway", "beat", "flower", "worker-cpu", "worker-gpu"}
    for name, variables in ours.items():
        assert variables["GPUFLOW_TRACES"] == "${GPUFLOW_TRACES:-none}", name
        assert variables["OTEL_SERVICE_NAME"] == f"gpuflow-{name.split('-')[0]}"
        assert variables.keys() >= {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER"}
        # The SDK takes an empty name of a certificate for none to be checked.
        assert "OTEL_EXPORTER_OTLP_CERTIFICATE" not in variables
    # By default spans go to the collector of the profile.
    assert services["jaeger"]["profiles"] == ["traces"]
    assert "http://jaeger:4318" in ours["gateway"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    extras = re.findall(r'-c constraints\.txt "\.\[([^]]+)\]"', DOCKERFILE)
    (of_worker,) = re.findall(r"^ARG WORKER_EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    assert [one.replace("${WORKER_EXTRAS}", of_worker).split(",")[-1] for one in extras] == ["traces", "traces"]
    assert services["worker-cpu"]["build"]["args"]["WORKER_EXTRAS"] == f"${{WORKER_EXTRAS:-{of_worker}}}"
    assert f"\nWORKER_EXTRAS={of_worker}\n" in (ROOT / ".env.example").read_text("utf-8")


def test_a_worker_in_a_container_has_the_name_of_that() -> None:
    services = compose()["services"]
    assert [services[name]["environment"]["WORKER_ID"] for name in ("worker-cpu", "worker-gpu")] == ["%H", "%H"]
    (pods,) = (one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == ("Deployment", "gpuflow-worker"))
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert {"name": "WORKER_ID", "value": "%H"} in container["env"]
    assert not pods["spec"]["template"]["spec"].get("hostNetwork")  # then it would be that of the node


def test_each_image_is_built_by_one_service() -> None:
    """An image that two services build is built twice, and each `up` replaces the containers of the one that lost."""
    services = compose()["services"]
    images = [one["image"] for one in services.values() if "build" in one]
    assert sorted(images) == ["gpuflow-control", "gpuflow-worker"]
    for name, one in services.items():
        if one["image"] in images and "build" not in one:
            assert one["pull_policy"] == "never", name


def test_each_setting_that_a_file_names_is_one() -> None:
    files = [ROOT / "docker-compose.yml", ROOT / ".env.example", *(ROOT / "deploy").rglob("*")]
    named = {
        name
        for path in files
        if path.is_file()
        for name in re.findall(r"\b(?:GPUFLOW|ELASTIC|ENABLE)_[A-Z_]+[A-Z]\b", path.read_text("utf-8"))
    }
    assert named >= {"GPUFLOW_TRACES", "ENABLE_ELASTIC_SCALING", "GPUFLOW_LOCK_DIR"}
    assert named - set(env_names().values()) == set()


def test_a_worker_has_time_to_hand_back() -> None:
    for name, service in compose()["services"].items():
        if name.startswith("worker"):
            assert seconds(service["stop_grace_period"]) > needed(service["command"]) + 10
    (unit,) = (path for path in UNITS if path.stem == "gpuflow-worker")
    service = read_unit(unit)["Service"]
    assert float(service["TimeoutStopSec"]) > needed(service["ExecStart"].split()) + 10
    (deployment,) = (
        one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == ("Deployment", "gpuflow-worker")
    )
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > needed(pod["containers"][0]["command"]) + 10


def test_the_gpu_worker_reserves_gpus_and_shares_their_locks() -> None:
    worker = compose()["services"]["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    places = [one["target"] for one in worker["volumes"] if isinstance(one, dict)]
    assert places == [worker["environment"]["GPUFLOW_LOCK_DIR"]]


def test_mounted_files_are_there() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            if isinstance(volume, str) and volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
    assert "healthcheck" in compose()["services"]["gateway"]
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "gpuflow"  # the alert rules name it
    assert Path(job["authorization"]["credentials_file"]).name in compose()["secrets"]


def test_images_do_not_run_as_root_and_say_whether_they_are_well() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.match(r"runtime AS ", stage)]
    assert len(final) == 2
    for stage in final:
        assert "\nUSER gpuflow\n" in stage and "\nHEALTHCHECK " in stage
    copied = set(re.findall(r"^COPY (?!--)([^\n]+) \S+$", DOCKERFILE, re.MULTILINE))
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    names = {name for names in copied for name in names.split()}
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in ignored, name
    links = [path for name in names for path in (ROOT / name).rglob("*") if path.is_symlink()]
    assert links  # configs/containers/loading-worker
    for link in links:
        target = link.resolve(strict=True).relative_to(ROOT)
        assert any(target.is_relative_to(name) for name in names), f"{link} leads to what the image does not get"


def read_unit(path: Path) -> dict[str, dict[str, str]]:
    """Read a unit; a key that stands twice is an error."""
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return {name: dict(section) for name, section in parser.items()}


@pytest.mark.parametrize("path", UNITS, ids=[path.stem for path in UNITS])
def test_units_are_hardened_and_leave_gpus_visible(path: Path) -> None:
    service = read_unit(path)["Service"]
    assert service["Type"] == ("notify" if path.stem == "gpuflow-worker" else "exec")
    assert service["User"] == "gpuflow" and service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict" and service["EnvironmentFile"] == "/etc/gpuflow/gpuflow.env"
    if path.stem == "gpuflow-worker":
        hides_gpus = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"}
        assert not hides_gpus & set(service)
        assert service["Delegate"] == "yes" and "ProtectControlGroups" not in service, "tasks have groups of their own"
        assert float(service["WatchdogSec"]) >= 2 * EXTENSION_SECONDS, "an extension ends before the watchdog"
        assert service["KillMode"] == "mixed", "its children must not get the SIGTERM that drains it"
        assert service["Restart"] == "on-failure", "one that has drained must not take work again"
        assert set(service["ReadWritePaths"].split()) == {"/run/lock/gpuflow", "/tmp", "/var/tmp"}
        assert "WORKER_ID=%H" in service["Environment"].split(), "one that was killed begins anew under its id"
    else:
        assert service["PrivateDevices"] == "yes"


def test_services_are_started_alike_everywhere() -> None:
    services = compose()["services"]
    of_units = {path.stem.removeprefix("gpuflow-"): read_unit(path)["Service"]["ExecStart"] for path in UNITS}
    assert set(of_units) == {"gateway", "beat", "flower", "worker"}

    def words(line: list[str]) -> list[str]:
        return [word.replace("0.0.0.0", "127.0.0.1") for word in line]

    for name, line in of_units.items():
        program, *rest = line.split()
        of_compose = services["worker-cpu" if name == "worker" else name]["command"]
        assert [Path(program).name, *rest] == words(of_compose)
    for one in MANIFESTS:
        if one["kind"] == "Deployment":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            name = one["metadata"]["name"].removeprefix("gpuflow-")
            assert container["command"] == services["worker-cpu" if name == "worker" else name]["command"]


def test_manifests_fit_together() -> None:
    named = {(one["kind"], one["metadata"]["name"]) for one in MANIFESTS}
    assert len(named) == len(MANIFESTS)
    for one in MANIFESTS:
        assert one["apiVersion"] and one["kind"] and one["metadata"]["name"]
        if one["kind"] != "Deployment":
            continue
        spec = one["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        pod = spec["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for source in container["envFrom"]:
                reference = source.get("configMapRef")
                assert reference is None or ("ConfigMap", reference["name"]) in named
        for volume in pod.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in named
    (scaled,) = (one for one in MANIFESTS if one["kind"] == "ScaledObject")
    assert ("Deployment", scaled["spec"]["scaleTargetRef"]["name"]) in named
    (trigger,) = scaled["spec"]["triggers"]
    check(trigger["metadata"]["query"])
    assert "sum(max by (queue,state) (" in trigger["metadata"]["query"], "two gateways that are scraped count once"
