"""Flower in a real Chromium as a viewer and as an operator of GPUFLOW_FLOWER_ROLES: the same pages, and buttons for one
of them alone; what the other's browser sends all the same is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.fleet.registry import Fleet
from tests.support.browser_page import BrowserPage, browser_page
from tests.support.fleet import TestFleet
from tests.support.monitored_fleet import (
    FlowerProcess,
    worker_entry,
    worker_id,
    write_pipelines,
    write_queues,
    write_run,
    write_workers,
)
from tests.support.waiting import eventually

OPERATOR, VIEWER = "ana:word", "ben:word"
SETTING = "GPUFLOW_FLOWER_ROLES"
ENV = {"FLOWER_BASIC_AUTH": f"{OPERATOR},{VIEWER}", SETTING: "ana=operator,ben=viewer"}
SAID = "document.querySelector('.live').textContent"
LIVE = "document.body.dataset.live === 'live'"
WORKER = worker_id(1)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TestFleet]:
    made = TestFleet(tmp_path)
    try:
        write_workers(made, 5)
        write_queues(made, 6, 200)
        yield made
    finally:
        made.close()


async def open_as(page: BrowserPage, flower: FlowerProcess, login: str, path: str) -> None:
    await page.open(f"{flower.url.replace('://', f'://{login}@')}/{path}")
    await page.until(LIVE)


async def send(page: BrowserPage, path: str, body: dict[str, str]) -> tuple[int, str]:
    """Send a request with the page's own token, as a script in the viewer's browser would."""
    asked = f"""(async () => {{
        const token = document.querySelector("meta[name=monitor]").dataset.token;
        const answer = await fetch(new URL({json.dumps(path)}, window.location.origin), {{
            method: "POST", headers: {{"Content-Type": "application/json", "X-XSRFToken": token}},
            body: JSON.stringify({json.dumps(body)}),
        }});
        return [answer.status, await answer.text()];
    }})()"""
    status, text = await page.value(asked)
    return int(status), str(text)


async def buttons(page: BrowserPage) -> int:
    return int(await page.value("document.querySelectorAll('main button').length"))


async def test_a_viewer_sees_all_pages_without_buttons_and_is_refused(fleet: TestFleet, tmp_path: Path) -> None:
    run = write_pipelines(fleet, 3)[0]
    write_run(fleet, run)
    paths = ("fleet", "queues", "pipelines", "scaling", "dead-letters", "merge", f"pipelines/{run}")
    registry = Fleet(fleet.app.redis, fleet.app.keys)

    def takes_work() -> bool:
        found: Any = registry.find(WORKER)
        return bool(found.takes_work)

    with FlowerProcess(fleet, env=ENV) as flower:
        async with browser_page(tmp_path / "viewer") as page:
            # Given a viewer who looks at each page
            for path in paths:
                await open_as(page, flower, VIEWER, path)
                # Then it is live, says why nothing can be done, and has no button
                assert f"is a viewer by {SETTING}" in await page.value(SAID), path
                assert await buttons(page) == 0, path
            await open_as(page, flower, VIEWER, "fleet")
            assert await page.value("document.querySelectorAll('#workers tr').length") == 5
            # and a row that changes while the page is open brings none
            fleet.registry.announce(dataclasses.replace(worker_entry(1), tasks=("a-new-task",)))
            await page.until(f"document.querySelector('[data-key=\"{WORKER}\"]').textContent.includes('a-new-task')")
            assert await buttons(page) == 0
            # When the viewer's browser sends an action all the same, with the token of the page
            for path, body in (
                ("/monitor/action", {"action": "disable", "target": WORKER}),
                ("/api/worker/shutdown/w1", {}),
                ("/api/task/revoke/none", {}),
            ):
                status, text = await send(page, path, body)
                # Then it is refused
                assert (status, SETTING in text) == (403, True), (path, text)
            # also if the page is made to have the button
            await page.value(f"""document.querySelector("main").insertAdjacentHTML("beforeend",
                '<button id="forged" data-action="disable" data-target="{WORKER}">disable</button>')""")
            await page.value("document.getElementById('forged').click()")
            await page.until("document.getElementById('said').dataset.failed === 'yes'")
            assert SETTING in await page.value("document.getElementById('said').textContent")
            assert takes_work()
        async with browser_page(tmp_path / "operator") as page:
            # and the operator has the buttons, and the same request is carried out
            await open_as(page, flower, OPERATOR, "fleet")
            assert await buttons(page) > 0
            assert SETTING not in await page.value(SAID)
            assert (await send(page, "/monitor/action", {"action": "disable", "target": WORKER}))[0] == 200
            eventually(lambda: not takes_work(), what="the worker that the operator has disabled")
