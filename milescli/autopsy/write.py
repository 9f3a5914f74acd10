"""why.txt beside the logs of an attempt that ended badly: the page of `miles why`. Written by the
driver, by its parent where the driver died, and by the watchdog, through `python -m`, where both
did."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from milescli.autopsy.page import page
from milescli.autopsy.why import find_why
from milescli.checkpoint.run_dir import RunDir

FILE = "why.txt"
WHAT_IT_TELLS = "what died first, its log, memory"
"""For errors that name the command."""


def write_why(log_dir: Path) -> Path | None:
    """Returns the file; None where nothing went wrong, or it cannot be told: what ended the run is
    shown in any case, and no damaged record or full disk may hide it."""
    file = log_dir / FILE
    with suppress(OSError, LookupError, ValueError, TypeError):
        why = find_why(RunDir(log_dir.parent.parent), is_over=True)
        if why.is_bad:
            file.write_text(page(why) + "\n", encoding="utf-8")
            return file
    return None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not (folder / FILE).exists():
        write_why(folder)
