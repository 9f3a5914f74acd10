"""What an endpoint is called with: a run, a question, and what the run has told. Endpoints are
plain functions in the files beside: `Asked` in, JSON values out; each runs in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.history import History
from milescli.web.histories import Histories
from milescli.web.question import Question
from milescli.web.shown import ShownRun

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request about one run."""

    shown: ShownRun
    histories: Histories
    question: Question = field(default_factory=Question)
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path: attempt, file."""
    nothing: History = field(default_factory=History)
    """Of an adapter that told nothing yet: the same one at each look."""

    @property
    def run(self) -> RunDir:
        """Its directory."""
        return self.shown.run

    @property
    def with_logs(self) -> RunDir:
        """Where logs, plan and manifest are: an adapter's are those of the run that trains it."""
        above = self.shown.above
        return above if above is not None and not (self.run.path / "logs").is_dir() else self.run

    @contextmanager
    def history(self) -> Iterator[History]:
        """See Histories.reading. Of an adapter without events of its own, what the run that trains
        it has told of it."""
        above = self.shown.above
        if above is None or self.run.events_file.exists():
            with self.histories.reading(self.run) as history:
                yield history
        else:
            with self.histories.reading(above) as history:
                yield history.adapters.get(self.run.name, self.nothing)
