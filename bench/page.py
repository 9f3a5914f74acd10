"""How the page of a big run feels in a browser: 10,000 steps, 100,000 kept samples (`big_run`).
`python bench/page.py [--steps 10000] [--folder FOLDER]`, with a Chromium and playwright there. The
peer is TensorBoard's page over the same scalars, in the same browser."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from big_run import CHARTS, NAME, write
from pairs import Figures, Machine, Table, command_line, report, take_turns
from playwright.sync_api import Browser, Page, sync_playwright

from milescli.platform.ports import free_ports

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.web.browser.chromium import FLAGS, chromium, served

WAIT_MS = 300_000
WATCH_S = 3.0
"""That frames are counted."""
COPY = "big-2"
COLUMNS = ",".join(names[0] for names in CHARTS)
TAGS = [name for names in CHARTS for name in names]
ROWS = {
    "start_s": ("from the start of the server until its first view", "s", "less"),
    "open_s": ("its first view, from nothing; ours reads the run meanwhile", "s", "less"),
    "again_s": ("first view with the server already running, the run read before", "s", "less"),
    "curves_s": ("six charts (ours: of two runs), from nothing", "s", "less"),
    "zoom_s": ("from a zoom until all six are drawn anew", "s", "less"),
    "scroll_fps": ("frames a second while it is scrolled", "1/s", "more"),
    "hover_fps": ("frames a second while the cursor runs over a chart", "1/s", "more"),
    "samples_s": ("samples of a step, from another page", "s", "less"),
    "heap_mb": ("JavaScript heap with six charts drawn", "MB", "less"),
}
FRAMES = """
() => new Promise((done) => {
  let count = 0;
  const begin = performance.now();
  const step = () => {
    count += 1;
    const spent = performance.now() - begin;
    if (spent < %d) requestAnimationFrame(step);
    else done((1000 * count) / spent);
  };
  requestAnimationFrame(step);
})
"""
MOVE = """
(selector) => {
  const at = document.querySelector(selector);
  let tick = 0;
  setInterval(() => {
    tick += 1;
    const box = at.getBoundingClientRect();
    const clientX = box.left + (box.width * ((tick * 7) %% 100)) / 100;
    const clientY = box.top + box.height / 2;
    at.dispatchEvent(new MouseEvent("mousemove", { clientX, clientY, bubbles: true }));
  }, 16);
}
"""
SCROLL = """
() => {
  let tick = 0;
  setInterval(() => {
    tick += 1;
    scrollTo(0, (document.documentElement.scrollHeight * (1 + Math.sin(tick / 20))) / 2);
  }, 16);
}
"""


def main() -> None:
    """Write the runs, measure both pages in turns, print the table."""
    parser = command_line(__doc__, num_pairs=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="keep the runs there, or take those there")
    asked = parser.parse_args()
    path = chromium() or _no_chromium(parser)
    with tempfile.TemporaryDirectory(prefix="page-") as temporary, sync_playwright() as playwright:
        folder = (asked.folder or Path(temporary)).resolve()
        write(folder, num_steps=asked.steps)
        if not (folder / COPY).exists():
            ignored = shutil.ignore_patterns("rollouts", "tensorboard")
            shutil.copytree(folder / NAME, folder / COPY, ignore=ignored)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        pairs = take_turns(
            lambda _: of_miles(browser, folder),
            lambda _: of_tensorboard(browser, folder),
            num_pairs=asked.pairs,
            num_warmups=0,
        )
        browser.close()
    table = Table(
        peer="TensorBoard's page, its six scalars that are named as ours, one run",
        machine=Machine.read(),
        notes=[
            "each turn starts the server anew; the peer's has read its files before its page is "
            "opened, ours reads when it is asked",
            "drawn by software, without a GPU",
        ],
    )
    for name, (what, unit, better) in ROWS.items():
        table.add(pairs, name=name, what=what, unit=unit, better=better)  # type: ignore[arg-type]
    report(table, asked)


def of_miles(browser: Browser, folder: Path) -> Figures:
    """Ours."""
    started = time.perf_counter()
    with served(folder=folder) as url:
        served_s = time.perf_counter() - started
        open_s = first_view(browser, url)
        figures = {"start_s": served_s + open_s, "open_s": open_s}
        figures["again_s"] = first_view(browser, url)
    with served(folder=folder) as url, page_of(browser) as page:
        began = time.perf_counter()
        page.goto(f"{url}#run={NAME}&with={COPY}&page=curves&columns={COLUMNS}")
        drawn(page, 6)
        figures["curves_s"] = time.perf_counter() - began
        figures["heap_mb"] = heap_mb(page)
        figures |= zoomed(page)
        figures |= frames(page, ".chart .u-over")
    with served(folder=folder) as url, page_of(browser) as page:
        page.goto(f"{url}#run={NAME}")
        page.wait_for_selector("#main .spark")
        began = time.perf_counter()
        page.keyboard.press("3")
        page.wait_for_selector(".sample .token")
        figures["samples_s"] = time.perf_counter() - began
    return figures


def first_view(browser: Browser, url: str) -> float:
    """Seconds until the overview is drawn, in a page that knows nothing yet."""
    with page_of(browser) as page:
        began = time.perf_counter()
        page.goto(f"{url}#run={NAME}")
        page.wait_for_selector("#main .verdict")
        page.wait_for_selector("#main .spark")
        return time.perf_counter() - began


def zoomed(page: Page) -> dict[str, float]:
    """By a link, as a drag leads to; over when no chart waits for its columns."""
    began = time.perf_counter()
    page.evaluate("location.hash += '&from=4000&to=6000'")
    page.wait_for_selector("button:text-is('Whole run')")
    page.wait_for_timeout(80)  # columns are asked for when the address has settled
    drawn(page, 6)
    return {"zoom_s": time.perf_counter() - began}


def drawn(page: Page, count: int) -> None:
    """Wait for so many charts, and for all that is being loaded."""
    page.wait_for_selector(f".chart >> nth={count - 1}")
    while page.evaluate("Boolean(document.querySelector('[aria-busy]'))"):
        time.sleep(0.01)


def of_tensorboard(browser: Browser, folder: Path) -> Figures:
    """The peer."""
    started = time.perf_counter()
    with tensorboard(folder / NAME / "tensorboard") as url:
        served_s = time.perf_counter() - started
        with page_of(browser) as page:
            open_s = charts_of_tensorboard(page, url)
            figures = {"start_s": served_s + open_s, "open_s": open_s}
        with page_of(browser) as page:
            began = time.perf_counter()
            figures["again_s"] = charts_of_tensorboard(page, url)
            page.wait_for_function(
                "document.querySelectorAll('scalar-card').length >= 6 &&"
                " !document.querySelector('scalar-card mat-spinner')"
            )
            figures["curves_s"] = time.perf_counter() - began
            figures["heap_mb"] = heap_mb(page)
            return {**figures, **frames(page, "scalar-card line-chart")}


def charts_of_tensorboard(page: Page, url: str) -> float:
    """Seconds until the first of them is drawn."""
    began = time.perf_counter()
    pattern = "^(" + "|".join(names[0] for names in CHARTS) + ")$"
    page.goto(f"{url}#timeseries&tagFilter={pattern.replace('/', '%2F')}")
    page.wait_for_selector("scalar-card line-chart canvas, scalar-card line-chart svg path")
    return time.perf_counter() - began


def frames(page: Page, selector: str) -> dict[str, float]:
    """Frames a second, while a cursor moves, then while it is scrolled as well."""
    count = FRAMES % (1000 * WATCH_S)
    page.evaluate(MOVE.replace("%%", "%"), selector)
    hover = page.evaluate(count)
    page.evaluate(SCROLL)
    return {"hover_fps": hover, "scroll_fps": page.evaluate(count)}


def heap_mb(page: Page) -> float:
    """After garbage was collected."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return session.send("Runtime.getHeapUsage")["usedSize"] / 1e6


@contextlib.contextmanager
def page_of(browser: Browser) -> Iterator[Page]:
    """A page that knows nothing yet."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Its server, and its URL when it answers."""
    [port] = free_ports(1)
    command = ["tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    command += ["--samples_per_plugin", "scalars=0", "--load_fast", "false"]
    server = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + WAIT_MS / 1000
        while not has_read(f"http://127.0.0.1:{port}/data/plugin/timeseries/tags"):
            assert time.monotonic() < deadline, "TensorBoard has not read its files"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(timeout=30)


def has_read(url: str) -> bool:
    """Does it know of scalars?"""
    with contextlib.suppress(httpx.HTTPError):
        told = httpx.get(url, timeout=WAIT_MS / 1000)
        return told.is_success and bool(
            told.json().get("scalars", {}).get("tagDescriptions")
            or told.json().get("scalars", {}).get("runTagInfo")
        )
    return False


def _no_chromium(parser: argparse.ArgumentParser) -> str:
    parser.error("no Chromium is found: name one in $MILES_CHROMIUM")


if __name__ == "__main__":
    main()
