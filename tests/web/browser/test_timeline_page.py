"""The timeline of the page: its legend, the mark of a profile, dragging."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from milescli.core.events import Notice, PhaseStarted, WorkerLost
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import served
from tests.web.browser.conftest import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHASES = ("start", "warmup", "check", "reference", "teacher", "eval", "train")
PROFILED_AT_S = 90.0
"""Seconds after the run's first event."""
COLOURS = """
() => Object.fromEntries([...document.querySelectorAll("[aria-label=Timeline] .keys li")].map(
  (one) => [one.textContent.trim(),
    getComputedStyle(one.querySelector(".swatch")).backgroundColor]))
"""
MARK = """
() => {
  const canvas = document.querySelector("canvas.lanes");
  const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width,
    canvas.height);
  const ink = getComputedStyle(document.body).color.match(/\\d+/g).map(Number);
  const counts = Array.from({ length: width }, (_, x) => x < 110 ? 0
    : Array.from({ length: height }, (_, y) => 4 * (y * width + x)).filter((at) =>
      data[at + 3] > 128 && ink.every((value, part) =>
        Math.abs(data[at + part] - value) < 60)).length);
  const most = Math.max(...counts);
  return { x: counts.indexOf(most), most, height, width };
}
"""
"""The column of the canvas that has the most of the colour of a mark."""
LENGTH = """
async () => {
  const told = await (await fetch("api/runs/whole-1/timeline?first=0")).json();
  return told.end_s - told.begin_s;
}
"""
MARGIN = 104
"""Pixels left of the lanes, for names."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[str]:
    """The URL of a run with every phase, a profile and a loss."""
    folder: Path = tmp_path_factory.mktemp("phases") / "runs"
    run = WrittenRun(path=folder / "whole-1")
    begin_s = run.at_s + 8.0
    for phase in PHASES:
        run.tell(PhaseStarted(phase=phase, detail="now"))
    run.at_s = begin_s + PROFILED_AT_S - 8.0
    run.tell(Notice(text="profile 1 is in runs/whole-1/profiles/1"))
    run.at_s = begin_s + 100.0
    run.steps(1, 10)
    run.tell(WorkerLost(worker="engine 0", what="it ended", why="killed", step=10, restart=1))
    run.tell(PhaseStarted(phase="stop", detail=""), PhaseStarted(phase="save", detail=""))
    with served(folder=folder) as url:
        yield url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_things_of_the_legend_share_a_colour(whole: str, tab: Opener, scheme: str) -> None:
    page = tab(whole, scheme=scheme).open("page=time&first=0")
    colours = page.evaluate(COLOURS)
    assert {"start", "warm-up", "steps", "rollout", "publish", "lost"} <= set(colours)
    assert len(set(colours.values())) == len(colours), colours


def test_a_profile_is_marked_where_it_was_done(whole: str, tab: Opener) -> None:
    told = tab(whole)
    page = told.open("page=time&first=0")
    page.wait_for_timeout(300)  # it is drawn in the next frame
    mark = page.evaluate(MARK)
    seconds = page.evaluate(LENGTH)
    wanted = MARGIN + (mark["width"] - MARGIN) * PROFILED_AT_S / seconds
    assert mark["most"] > mark["height"] / 3  # a dashed line over the lanes
    assert abs(mark["x"] - wanted) <= 2
    assert "Profile 1" in told.text("[aria-label=Timeline]")


def test_a_finger_that_scrolls_lets_go_of_the_timeline(whole: str, tab: Opener) -> None:
    told = tab(whole)
    page = told.open("page=time")
    box = page.locator("canvas.lanes").bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, box["y"] + 40)
    page.mouse.down()
    page.dispatch_event("canvas.lanes", "pointercancel")
    for by in range(0, 60, 6):  # over the lane below, where a step rolls out half of its time
        page.mouse.move(middle + by, box["y"] + 72)
        if told.text(".readout-line").startswith("rollout: "):
            break
    else:
        raise AssertionError(told.text(".readout-line"))
    page.mouse.up()
