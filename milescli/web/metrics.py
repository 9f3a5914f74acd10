"""Implements `/metrics`: the metrics of all shown runs for Prometheus, each sample with the label
`run`. Records are read from where the last scrape ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from milescli import __version__
from milescli.checkpoint.run_dir import RunDir
from milescli.insight.reader import LineReader
from milescli.platform.memory_record import FILE
from milescli.trackers.prometheus import Exposition
from milescli.web.shown import ShownRun, ShownRuns

QUIET_S = 3600.0
"""Runs of a folder without an event for this many seconds are left out."""


@dataclass(slots=True)
class _RunReaders:
    exposition: Exposition
    events: LineReader
    memory: LineReader | None = None
    """Memory of the newest attempt."""


@dataclass(slots=True)
class Metrics:
    """Holds the metrics of all runs that one server shows."""

    _fed: dict[Path, _RunReaders] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def text(self, shown: ShownRuns) -> bytes:
        """Return the text that Prometheus scrapes."""
        runs = [one for one in shown.all() if shown.folder is None or _is_fresh(one.run)]
        with self._lock:
            paths = {one.run.path for one in runs}
            self._fed = {path: fed for path, fed in self._fed.items() if path in paths}
            return join_expositions(self._text(one) for one in runs).encode()

    def _text(self, shown: ShownRun) -> str:
        run = shown.run
        fed = self._fed.get(run.path)
        if fed is None:
            fed = self._fed[run.path] = _RunReaders(_new(shown), LineReader(run.events_file))
        for records, is_new in fed.events.blocks():
            if is_new:
                fed.exposition, fed.memory = _new(shown), None
            for record in records:
                fed.exposition.feed(record)
        newest = next(reversed(run.attempts()), None)
        if newest is not None and (fed.memory is None or fed.memory.file.parent != newest):
            fed.memory = LineReader(newest / FILE)
        for record in fed.memory.new()[0] if fed.memory else ():
            fed.exposition.feed(record)
        return fed.exposition.text()


def join_expositions(texts: Iterable[str]) -> str:
    """Join the texts of several runs: the header of a metric is written once, before all its
    samples."""
    heads, samples = dict[str, str](), dict[str, str]()
    for text in texts:
        for block in re.split(r"^# HELP ", text, flags=re.MULTILINE)[1:]:
            name = block.split(" ", 1)[0]
            about, kind, rest = block.split("\n", 2)
            heads.setdefault(name, f"# HELP {about}\n{kind}\n")
            samples[name] = samples.get(name, "") + rest
    return "".join(head + samples[name] for name, head in heads.items())


def _new(shown: ShownRun) -> Exposition:
    return Exposition(run=shown.id, version=__version__, labels={"run": shown.id})


def _is_fresh(run: RunDir) -> bool:
    try:
        return time.time() - run.events_file.stat().st_mtime < QUIET_S
    except OSError:
        return False
