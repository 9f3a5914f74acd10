"""Makes `kept/` of real runs, for the tests of this folder: without weights and data, with the end
of each log, the first rows of each evaluation, and no path of the computer it ran on.

    python -m tests.web.browser.keep runs/quickstart-1 runs/quickstart-2
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

KEPT = Path(__file__).parent / "kept"
WHOLE = ("events.jsonl", "manifest.json", "plan.json", "recipe.yaml")
LINES = {
    "logs/*/*.log": 60,
    "logs/*/verdict.json": 60,
    "eval/*.jsonl": 25,
    "logs/*/memory.jsonl": 80,
}
"""Pattern -> the last lines that are kept of each file."""
STEPS = (1, 2, 6, 11, 12, 13, 24)
"""Whose samples are kept."""


def keep(run: Path, *, is_whole: bool) -> Path:
    """A copy of a run below `kept/`; of one that is not whole only what curves need."""
    folder = KEPT / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in WHOLE:
        _write(folder / name, (run / name).read_text(encoding="utf-8"), run)
    for pattern, count in LINES.items():
        if is_whole or "verdict" in pattern:
            for file in sorted(run.glob(pattern)):
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[-count:]
                if not file.is_symlink() and "latest" not in file.parts:
                    _write(folder / file.relative_to(run), "".join(lines), run)
    if is_whole:
        for step in STEPS:
            file = run / "rollouts" / f"step_{step}.jsonl"
            _write(folder / file.relative_to(run), file.read_text(encoding="utf-8"), run)
    return folder


def _write(file: Path, text: str, run: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for place in (run.resolve().parent.parent, Path(__file__).resolve().parents[3], Path.home()):
        text = text.replace(str(place), "/home/somebody")
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for number, path in enumerate(sys.argv[1:]):
        print(keep(Path(path), is_whole=number == 0))
