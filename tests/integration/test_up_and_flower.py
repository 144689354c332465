"""`gpuflow up` starts a Flower that answers its user alone: no other local user, and no page of another site."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.test_cli import Shell
from tests.support.waiting import eventually, patient

TASK = '{"args": [], "kwargs": {"spec": {"taskType": "echo", "echo": {"output": 1}}}}'
APPLY = "/api/task/async-apply/gpuflow.echo"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_flower_starts_nothing_for_a_page_of_another_site(shell: Shell) -> None:
    # Given a local cluster as a user starts it
    process, out = shell.start("up", "--no-gateway", "--no-beat")
    text = shell.until(process, out, "ready")
    address = next(line.split()[1] for line in text.splitlines() if line.startswith("flower"))
    password = shell.folder / "state" / "flower-password"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    assert password.read_text().strip() not in text

    def answers() -> bool:
        try:
            return httpx.get(address, timeout=patient(10)).status_code == 401
        except httpx.TransportError:
            return False

    eventually(answers, within=60, what="an answer of Flower")
    with httpx.Client(base_url=address, timeout=patient(30)) as anyone:
        # When a web page sends a task, as a browser does without asking first
        foreign = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
        refused = anyone.post(APPLY, content=TASK, headers=foreign)
        # Then it gets nothing, and may read nothing
        assert refused.status_code == 403
        assert anyone.post(APPLY, content=TASK).status_code == 401
        assert "access-control-allow-origin" not in refused.headers
        for path in ("/", "/workers", "/tasks", "/api/workers", "/api/tasks"):
            assert anyone.get(path).status_code == 401
        # nor with a login that a browser remembers
        login = httpx.BasicAuth("gpuflow", password.read_text().strip())
        assert anyone.post(APPLY, content=TASK, headers=foreign, auth=login).status_code == 403
        assert shell.json("status")["tasks"] == []
        # and the user gets in
        assert anyone.post(APPLY, content=TASK, auth=login).status_code == 200
    eventually(lambda: [row["state"] for row in shell.json("status")["tasks"]] == ["SUCCEEDED"], what="its end")
    # and its page of the broker finds the queues on the server's socket
    page = httpx.get(f"{address}/broker", auth=login, timeout=patient(30)).text
    assert "server.sock" in page
    assert "<td>tasks</td>" in page
