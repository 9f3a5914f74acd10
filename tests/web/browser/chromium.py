"""A Chromium on this computer, and the page's server beside it. Shared by the tests of this folder,
by `pictures` and by bench/page.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VARIABLE = "MILES_CHROMIUM"
FLAGS = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
"""The sandbox needs what a container seldom gives; only our own page is opened."""
STOP_S = 120.0


def chromium() -> str | None:
    """Its path: that of $MILES_CHROMIUM, else the first that is found."""
    if told := os.environ.get(VARIABLE):
        return told
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def served(
    *runs: Path, folder: Path | None = None, port: int = 0, words: Sequence[str] = ()
) -> Iterator[str]:
    """`miles ui` of some runs, or of a folder of runs, as a process of its own; its URL with the
    key. It has ended at the end. Port 0: any. `words`: further options."""
    environment = {**os.environ, **({"MILES_RUN__DIR": str(folder)} if folder else {})}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "milescli",
            "--json",
            "ui",
            "--port",
            str(port),
            *words,
            *map(str, runs),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield url_of(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """That it says first. Raises AssertionError where it ends before."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(timeout=STOP_S)
        assert process.stderr is not None
        raise AssertionError(f"miles ui ended with {process.returncode}: {process.stderr.read()}")
    return str(json.loads(line)["url"])
