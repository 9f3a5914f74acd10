"""The file that a fault of ours leaves behind: the traceback and what is needed to read it. Called
by the single door only."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from milescli import __version__


def write_crash_report(error: BaseException, *, argv: list[str]) -> Path:
    """Write traceback, versions and command line; returns the file. Falls back to the temporary
    directory."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = "\n".join(
        [
            f"miles {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: miles {' '.join(argv)}",
            f"directory: {Path.cwd()}",
            "",
            *traceback.format_exception(error),
        ]
    )
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "miles"
    try:
        state.mkdir(parents=True, exist_ok=True)
        file = state / name
        file.write_text(text)
    except OSError as problem:  # a read-only home
        print(f"cannot write to {state}: {problem}", file=sys.stderr)
        file = Path(tempfile.gettempdir()) / f"miles-{name}"
        file.write_text(text)
    return file
