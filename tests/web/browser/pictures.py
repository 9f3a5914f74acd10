"""Makes the pictures of docs/ui.md: every page of the kept run, in light and dark, at the widths of
a desk, a tablet and a phone. PNG with few colours, so that they stay small.

    python -m tests.web.browser.pictures [PAGE...]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.web.browser.chromium import FLAGS, chromium, served
from tests.web.browser.conftest import KEPT, Tab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "ui"
SIZES = {1440: 900, 768: 1024, 375: 760}
NUM_COLOURS = 160
VIEWS = {
    "overview": "",
    "curves": "&step=12&smooth=0.6&with=quickstart-2",
    "samples": "&step=2",
    "time": "",
    "memory": "",
    "evaluations": "&path=eval/step_0.jsonl",
    "recipe": "",
    "logs": "",
    "runs": "&base=quickstart-2",
}
"""Page -> what else its address says."""


def take(browser: Browser, url: str, names: list[str]) -> None:
    """All pictures of some pages."""
    for width, height in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # type: ignore[arg-type]
                reduced_motion="reduce",
            )
            tab = Tab(page=context.new_page(), url=url)
            tab.open("run=quickstart-1")
            for name in names:
                tab.go(f"run=quickstart-1&page={name}{VIEWS[name]}")
                tab.page.wait_for_timeout(400)  # charts are drawn in the next frame
                save(tab.page.screenshot(), FOLDER / f"{name}-{scheme}-{width}.png")
            context.close()


def palette(picture: Image.Image) -> Image.Image:
    """The colours that are most of a picture, exactly, and some between all others, however few."""
    counted = sorted(picture.getcolors(2**24), reverse=True)
    frequent = [colour for _, colour in counted[: NUM_COLOURS // 2]]
    others = [colour for _, colour in counted[NUM_COLOURS // 2 :]] or frequent
    line = Image.new("RGB", (len(others), 1))
    line.putdata(others)
    rest = line.quantize(NUM_COLOURS // 2).getpalette()
    whole = Image.new("P", (1, 1))
    whole.putpalette([value for colour in frequent for value in colour] + rest)
    return whole


def save(png: bytes, file: Path) -> None:
    """With few colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.quantize(palette=palette(picture), dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file.name} {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with served(folder=KEPT) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        take(browser, url, sys.argv[1:] or [*VIEWS])
        browser.close()
