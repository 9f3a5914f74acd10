"""Opens the page in this computer's browser without naming the key on a command line, where every
user of the computer could read it: by a file that only its owner can read."""

from __future__ import annotations

import atexit
import html
import os
import shutil
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path


def open_page(url: str, *, failed: Callable[[str], None]) -> None:
    """`failed` is told where there is no browser. The file goes at the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="miles-ui-"))  # 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "open.html"
    quoted = html.escape(url, quote=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={quoted}"><a href="{quoted}">miles</a>\n'
        )
    if not webbrowser.open(file.as_uri()):
        failed("no browser opened; open the URL above yourself")
