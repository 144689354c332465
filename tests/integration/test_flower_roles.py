"""Roles of single users in a real `celery -A gpuflow flower`: what a viewer sees and is refused, and whom the audit log
names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from flower import urls
from tornado.web import URLSpec, create_signed_value

from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.client import submit
from gpuflow.monitor.roles import NEEDS
from gpuflow.tokens.rights import Role
from tests.support.fleet import TestFleet
from tests.support.monitored_fleet import FlowerProcess
from tests.support.waiting import eventually, patient

PAGES = ("fleet", "queues", "pipelines", "scaling", "dead-letters", "merge")
SETTING = "GPUFLOW_FLOWER_ROLES"
LOGINS = {"ana": "ana:a word", "ben": "ben:b word", "cem": "cem:c word"}
ENV = {"FLOWER_BASIC_AUTH": ",".join(LOGINS.values()), SETTING: "ana=operator,ben=viewer"}
SECRET = "of the cookies of this test"
OAUTH = {
    "FLOWER_BASIC_AUTH": "",
    "FLOWER_AUTH": ".*@x.org",
    "FLOWER_AUTH_PROVIDER": "flower.views.auth.GoogleAuth2LoginHandler",
    "FLOWER_COOKIE_SECRET": SECRET,
    "FLOWER_URL_PREFIX": "monitor",
    SETTING: "Ana@x.org=operator,*=viewer",
}


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One worker for all tests of this file."""
    long_fleet.start_worker("w1")
    return long_fleet


@pytest.fixture(scope="module")
def flower(fleet: TestFleet) -> Iterator[FlowerProcess]:
    with FlowerProcess(fleet, env=ENV) as process:
        yield process


@pytest.fixture
def operator(flower: FlowerProcess) -> Iterator[httpx.Client]:
    with flower.client(LOGINS["ana"]) as client:
        yield client


@pytest.fixture(params=["ben", "cem"])
def viewer(flower: FlowerProcess, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A user who is named as a viewer, and one who is not named."""
    with flower.client(LOGINS[request.param]) as client:
        yield client


def act(user: httpx.Client, action: str, target: str) -> httpx.Response:
    found = re.search(r'data-token="([^"]+)"', user.get("/fleet").text)
    assert found
    return user.post("/monitor/action", json={"action": action, "target": target}, headers={"X-XSRFToken": found[1]})


def waiting_task(fleet: TestFleet) -> str:
    """A task that no worker of the fleet can run."""
    return submit({**fleet.echo(message="x"), "resources": {"labels": {"no": "such"}}}, app=fleet.app).id


def node_of_w1(user: httpx.Client) -> str:
    def found() -> str:
        return next(iter(user.get("/api/workers", params={"refresh": "1"}).json()), "")

    return eventually(found, within=60, what="the worker in Flower's list")


def takes_work(fleet: TestFleet) -> bool:
    worker = fleet.registry.find("w1")
    assert worker is not None
    return worker.takes_work and worker.is_there


def test_a_viewer_sees_all_pages_and_no_buttons(fleet: TestFleet, viewer: httpx.Client, operator: httpx.Client) -> None:
    task = waiting_task(fleet)
    node = node_of_w1(operator)
    # The operator is offered actions, on our pages and on Flower's
    assert 'data-action="disable"' in operator.get("/fleet").text
    assert "worker-shutdown" in operator.get(f"/worker/{node}").text
    assert SETTING not in operator.get("/fleet").text
    # The viewer sees the same pages, updates included, without
    for path in (*(f"/{page}" for page in PAGES), *(f"/{page}/updates" for page in PAGES)):
        answer = viewer.get(path)
        assert answer.status_code == 200, path
        assert "data-action=" not in answer.text.replace('data-action="/monitor/action"', ""), path
    text = viewer.get("/fleet").text
    assert "w1" in text
    assert f"is a viewer by {SETTING}" in text
    assert "worker-shutdown" not in viewer.get(f"/worker/{node}").text
    for path in ("/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks", "/api/task/types",
                 "/api/queues/length", "/metrics", "/healthcheck", "/static/css/flower.css", f"/worker/{node}",
                 "/monitor-assets/monitor.js"):  # fmt: skip
        assert viewer.get(path).status_code == 200, path
    # and Flower's table of tasks, which sends its search in a POST
    assert (
        viewer.post("/tasks/datatable", data=_search()).status_code
        == operator.get("/tasks/datatable", params=_search()).status_code
        == 200
    )
    fleet.app.cancel_task(task, "")


def _search() -> dict[str, str]:
    return {"draw": "1", "start": "0", "length": "10", "search[value]": "", "order[0][column]": "0",
            "order[0][dir]": "asc", "columns[0][data]": "name"}  # fmt: skip


def test_a_viewer_is_refused_everything_that_acts(
    fleet: TestFleet, viewer: httpx.Client, operator: httpx.Client
) -> None:
    task, node = waiting_task(fleet), node_of_w1(operator)
    # Given all routes of the installed Flower and of ours; when a viewer sends what is no GET
    patterns = {pattern for _, pattern in NEEDS} | {_pattern(spec) for spec in urls.handlers}
    refused = 0
    for pattern in sorted(patterns - {"/login/?"}):
        path = pattern.replace("(.+)", task if "/task/" in pattern else node)
        path = re.sub(r"\(\[\^/\].*?\)|\(\.\*\)|\.\*", task, path)
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = viewer.request(method, path, headers={"X-XSRFToken": "x", "Cookie": "_xsrf=x"})
            if NEEDS.get((method, pattern)) is Role.VIEWER:
                continue
            # Then it is refused, and where anything answers there, with the name of the setting
            tornados = path.startswith(
                "/static/"
            )  # its own route for files comes before Flower's, and answers GET alone
            assert answer.status_code == (405 if tornados else 403), f"{method} {path}"
            assert SETTING in answer.text or not path.startswith("/api/"), f"{method} {path}: {answer.text}"
            refused += 1
    assert refused > 100
    for action, target in (("disable", "w1"), ("drain", "w1"), ("cancel", task), ("dead-purge", task)):
        answer = act(viewer, action, target)
        assert answer.status_code == 403
        assert SETTING in answer.json()["error"]
    # and nothing has changed
    assert fleet.state(task) == "QUEUED"
    assert takes_work(fleet)
    assert node in operator.get("/api/workers", params={"refresh": "1"}).json()
    assert not _entries(fleet, "flower:*")
    fleet.app.cancel_task(task, "")


def _pattern(spec: object) -> str:
    return spec.regex.pattern.removesuffix("$") if isinstance(spec, URLSpec) else spec[0]  # type: ignore[index]


def _entries(fleet: TestFleet, actor: str, action: str = "*") -> list[str]:
    found, _ = AuditLog(fleet.app.redis, fleet.app.keys).newest(Filter(actor=actor, action=action), 1000)
    return [entry.fields["action"] for entry in found]


def test_an_operator_acts_and_the_audit_log_names_them(fleet: TestFleet, operator: httpx.Client) -> None:
    assert act(operator, "disable", "w1").status_code == 200
    assert not takes_work(fleet)
    assert act(operator, "release", "w1").status_code == 200
    eventually(lambda: takes_work(fleet), what="the worker takes work again")
    assert {"worker.disable", "worker.release"} <= set(_entries(fleet, "flower:ana 127.0.0.1"))
    # and by Flower's own API
    task = waiting_task(fleet)
    answer = operator.post(f"/api/task/revoke/{task}")
    assert answer.json() == {"message": f"Revoked '{task}'"}
    assert operator.post("/api/worker/pool/grow/nobody").status_code == 404
    fleet.app.cancel_task(task, "")


def test_who_gives_no_password_or_a_wrong_one_is_asked_for_it(flower: FlowerProcess) -> None:
    for login in (None, "ana:wrong"):
        with flower.client(login) as stranger:
            for method, path in (("GET", "/fleet"), ("GET", "/workers"), ("POST", "/api/task/revoke/x")):
                assert stranger.request(method, path).status_code == 401, (login, path)


def test_an_oauth_user_has_the_role_of_the_address(fleet: TestFleet) -> None:
    # Given a Flower with OAuth under a prefix, and who came back from the provider
    with FlowerProcess(fleet, "oauth", env=OAUTH) as process:

        def came_back(email: str) -> httpx.Client:
            client = process.client(login=None)
            client.cookies["user"] = create_signed_value(SECRET, "user", email).decode()
            return client

        with came_back("ana@x.org") as ana, came_back("ben@x.org") as ben, came_back("eve@y.org") as eve:
            # Then only the operator acts, and is named
            assert act(ben, "disable", "w1").status_code == 403
            assert takes_work(fleet)
            assert act(ana, "disable", "w1").status_code == 200
            assert act(ana, "release", "w1").status_code == 200
            eventually(lambda: takes_work(fleet), what="the worker takes work again")
            assert {"worker.disable", "worker.release"} <= set(_entries(fleet, "flower:ana@x.org 127.0.0.1"))
            headers = {"X-XSRFToken": ana.cookies["_xsrf"]}
            assert ana.post("/api/task/revoke/none", headers=headers).status_code == 200
            refused = ben.post("/api/task/revoke/none", headers={"X-XSRFToken": ben.cookies["_xsrf"]})
            assert refused.status_code == 403
            assert SETTING in refused.text
            # and nobody acts whom the provider knows and Flower does not, or who has not been there yet
            with process.client(login=None) as stranger:
                for user in (eve, stranger):
                    user.cookies["_xsrf"] = token = ana.cookies["_xsrf"]
                    headers = {"X-XSRFToken": token}
                    assert user.post("/api/task/revoke/none", headers=headers).status_code == 403
                    assert user.post("/login", headers=headers).status_code == 405
                    assert user.get("/fleet").status_code == 302


@pytest.mark.parametrize("options", [(), ("--no-fleet-pages",)])
@pytest.mark.parametrize("everybody", ["viewer", "operator"])
def test_without_a_login_nobody_acts(fleet: TestFleet, everybody: str, options: tuple[str, ...]) -> None:
    # Given roles, but no login by which anybody has a name, and an API that is open to everybody
    env = {"FLOWER_BASIC_AUTH": "", "FLOWER_UNAUTHENTICATED_API": "true", SETTING: f"ana=operator,*={everybody}"}
    with FlowerProcess(fleet, f"open-{everybody}{len(options)}", *options, env=env) as process:
        # Then it is said at the start,
        eventually(lambda: "flower_roles_without_login" in process.log_path.read_text(), what="the warning")
        with process.client(login=None) as anyone:
            # nobody acts, by Flower's own API either,
            refused = anyone.post("/api/task/revoke/none")
            assert refused.status_code == 403
            assert SETTING in refused.text
            assert anyone.get("/api/workers").status_code == 200
            # and pages are shown without buttons
            if not options:
                assert "FLOWER_BASIC_AUTH" in anyone.get("/fleet").text
                assert "data-action=" not in anyone.get("/fleet/updates").text
                assert act(anyone, "disable", "w1").status_code == 403


def test_a_login_of_flowers_own_file_is_a_login(fleet: TestFleet) -> None:
    file = fleet.folder / "flower_options.py"
    file.write_text(f"basic_auth = ['{LOGINS['ana']}', '{LOGINS['ben']}']\n")
    env = {"FLOWER_BASIC_AUTH": "", SETTING: ENV[SETTING]}
    with (
        FlowerProcess(fleet, "of-file", f"--conf={file}", env=env) as process,
        process.client(LOGINS["ben"]) as ben,
        process.client(LOGINS["ana"]) as ana,
    ):
        assert ben.post("/api/task/revoke/none").status_code == 403
        assert ana.post("/api/task/revoke/none").status_code == 200
        assert "flower_roles_without_login" not in process.log_path.read_text()


def test_a_flower_without_the_pages_keeps_the_roles(fleet: TestFleet) -> None:
    with (
        FlowerProcess(fleet, "bare", "--no-fleet-pages", env=ENV) as process,
        process.client(LOGINS["ben"]) as ben,
        process.client(LOGINS["ana"]) as ana,
    ):
        assert ben.get("/workers").status_code == 200
        assert ben.get("/fleet").status_code == 404
        refused = ben.post("/api/task/revoke/none")
        assert refused.status_code == 403
        assert SETTING in refused.text
        assert ana.post("/api/task/revoke/none").status_code == 200


@pytest.mark.parametrize("options", [(), ("--no-fleet-pages",)])
def test_flower_does_not_start_with_a_role_that_there_is_not(fleet: TestFleet, options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "gpuflow", "flower", "--port=0", *options],
        env={**os.environ, "REDIS_URL": str(fleet.settings.redis_url), SETTING: "ana=admin"},
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 2
    assert "'admin' is no role" in done.stderr
    assert "give user=role by commas, with the roles viewer and operator" in done.stderr
    assert "Traceback" not in done.stderr
