"""The monitor's pages in a real Chromium, with fleets of 0, 5 and 500 workers: nothing of a task runs, nothing is wider
than a phone, the keyboard is enough, and what changes in Redis changes on the page.

`MONITOR_SCREENSHOTS=folder` keeps a picture of each page at each size, light and dark.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.fleet.registry import Fleet
from gpuflow.monitor.pages import MERGE_COUNTS
from tests.support.browser_page import BrowserPage, browser_page
from tests.support.fleet import TestFleet
from tests.support.monitored_fleet import (
    FlowerProcess,
    worker_entry,
    worker_id,
    write_dead_letters,
    write_pipelines,
    write_queues,
    write_run,
    write_scaling,
    write_workers,
)
from tests.support.waiting import eventually

LOGIN = "ana:word"
PAGES = ("fleet", "queues", "pipelines", "scaling", "dead-letters", "merge")
LOOKS = (("desktop", 1400, 900, False), ("phone", 390, 844, False), ("dark", 1400, 900, True))
PICTURES = os.environ.get("MONITOR_SCREENSHOTS")
#: How many tables go on beyond the edge of what scrolls them.
HIDDEN = (
    """[...document.querySelectorAll('.scroll:has(table)')].filter(one => one.scrollWidth > one.clientWidth).length"""
)
LIVE = "document.body.dataset.live === 'live'"


@pytest.fixture(scope="module", params=[0, 5, 500])
def sized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestFleet, int]]:
    fleet = TestFleet(tmp_path_factory.mktemp(f"fleet{request.param}"))
    try:
        write_workers(fleet, request.param)
        yield fleet, request.param
    finally:
        fleet.close()


def address(flower: FlowerProcess, page: str) -> str:
    return f"{flower.url.replace('://', f'://{LOGIN}@')}/{page}"


async def test_pages_at_every_size(sized: tuple[TestFleet, int], tmp_path: Path) -> None:
    # Given a fleet with names that are markup
    fleet, size = sized
    pages = list(PAGES)
    if size:
        write_queues(fleet, *((6, 200) if size < 100 else (30, 20_000)))
        runs = write_pipelines(fleet, 3 if size < 100 else 100)
        write_run(fleet, runs[0])
        write_scaling(fleet, size // 5 + 1)
        write_dead_letters(fleet, size // 5 + 1)
        fleet.app.merger.store.add_counts(dict.fromkeys(MERGE_COUNTS, 1234 * size))
        pages.append(f"pipelines/{runs[0]}")
    with FlowerProcess(fleet, env={"FLOWER_BASIC_AUTH": LOGIN}) as flower:
        async with browser_page(tmp_path / "profile") as page:
            for path in pages:
                # When a page is opened
                await page.open(address(flower, path))
                await page.until(LIVE)
                # Then no name became an element or ran
                assert await page.value("document.title.endsWith('· gpuflow')"), path
                assert await page.value("document.querySelectorAll('main script, main img').length") == 0
                for name, width, height, dark in LOOKS:
                    await page.look(width=width, height=height, dark=dark)
                    wide = await page.value("document.documentElement.scrollWidth - window.innerWidth")
                    assert wide <= 0, f"{path} is {wide} px wider than a {name} window"
                    hidden = await page.value(HIDDEN)
                    assert name != "phone" or hidden == 0, f"{hidden} tables of {path} are wider than a phone"
                    if PICTURES:
                        label = "pipeline" if "/" in path else path
                        await page.screenshot(Path(PICTURES) / f"{size}-{label}-{name}.png")
                if path == "fleet":
                    rows = await page.value("document.querySelectorAll('#workers tr:not([data-key=empty])').length")
                    assert rows == size
            if size:
                await _is_live(fleet, flower, page)


async def _is_live(fleet: TestFleet, flower: FlowerProcess, page: BrowserPage) -> None:
    """What changes in Redis changes on the page, under the focus; a button works by the keyboard."""
    await page.look(width=1400, height=900)
    await page.open(address(flower, "fleet"))
    await page.until(LIVE)
    row = f"document.querySelector('[data-key=\"{worker_id(1)}\"]')"
    await page.value(f"window.kept = document.querySelector('[data-key=\"{worker_id(2)}\"]'); 1")
    await page.value(f"{row}.querySelector('[data-action=disable]').focus()")
    fleet.registry.announce(dataclasses.replace(worker_entry(1), tasks=("a-new-task",)))
    await page.until(f"{row}.textContent.includes('a-new-task')")
    assert await page.value("document.activeElement.dataset.action") == "disable", "the focus was lost"
    # It may have changed: nobody beats for these workers, and on a slow machine they are silent by now.
    now = f"document.querySelector('[data-key=\"{worker_id(2)}\"]').outerHTML"
    kept = await page.value(f"window.kept.isConnected || {now} !== window.kept.outerHTML")
    assert kept, "a row that has not changed was replaced"
    await page.press("Enter", "\r")
    registry = Fleet(fleet.app.redis, fleet.app.keys)

    def is_disabled() -> bool:
        found = registry.find(worker_id(1))
        return found is not None and not found.takes_work

    await page.until("!document.getElementById('said').hidden && document.getElementById('said').textContent")
    eventually(is_disabled, what="the worker that was disabled by the keyboard")
    await page.until(f"{row}.querySelector('[data-action=enable]') !== null")
    assert await page.value("document.activeElement.dataset.action") == "enable", "the focus was lost"
