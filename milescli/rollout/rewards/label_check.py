"""Checks every label with the reward once, before a run starts: a label that no response can match
is refused with its line. Called where prompts are loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from milescli.core.errors import MilesError, RewardError, WaitTimeout
from milescli.core.user_code import user_traceback
from milescli.data.rows import BadRow, bad_rows_error
from milescli.rollout.base import RewardFn
from milescli.rollout.rewards.scoring import NUM_THREADS

TIMEOUT_S = 600.0
"""Bound on the check of all labels of a file. 100,000 different LaTeX labels take `math` about five
minutes on two cores; plain numbers take next to nothing."""
MAX_LABELS = 10_000
"""Number of different labels to check in a file too large to be tokenised at the start."""
REPORT_AFTER_S = 1.0
_SHOWN_CHARACTERS = 60

Label = str | None


class Labelled(Protocol):
    """Describes a prompt or a row of a file with a label."""

    @property
    def index(self) -> int:
        """Return its line, counted from 0."""
        ...

    @property
    def label(self) -> Label:
        """Return the label, with which the reward compares."""
        ...


def check_labels(
    reward: RewardFn,
    prompts: Sequence[Labelled],
    *,
    name: str,
    path: Path,
    say: Callable[[str], None] | None = None,
    num_labels: int | None = None,
    timeout_s: float = TIMEOUT_S,
    say_after_s: float = REPORT_AFTER_S,
) -> None:
    """Check all different labels; do nothing if the reward has no `check_label` (see RewardFn).
    `name`: of the reward in the recipe; `path`: file of the prompts; `say`: receives a line if the
    check takes longer than `say_after_s`, or if the file has more different labels (`num_labels`)
    than are checked. Raises DataError with the first bad rows, RewardError if the reward's own code
    fails, and WaitTimeout after `timeout_s`."""
    check = getattr(reward, "check_label", None)
    if check is None:
        return
    checks = _Checks(check, prompts, num_threads=getattr(reward, "max_concurrency", 1))
    if say is not None and num_labels is not None and num_labels > checks.num_labels:
        say(
            f"{path} has {num_labels:,} different labels; {checks.num_labels:,} of them, evenly "
            f"spread, are checked for `{name}` before the run"
        )
    if not checks.finish(min(say_after_s, timeout_s)):
        if say is not None:
            say(f"checking that `{name}` can grade {checks.num_labels} different labels of {path}")
        if not checks.finish(timeout_s - say_after_s):
            raise WaitTimeout(
                f"only {checks.num_done} of {checks.num_labels} different labels of {path} were "
                "checked",
                why=f"the launch waited {timeout_s:g} s for `{name}`, which is still checking "
                + ", ".join(_shown(label) for label in checks.in_work),
                fix="--set data.prompts=FILE   # fewer rows, or labels that can be checked faster",
            )
    if checks.failure is not None:
        label, error = checks.failure
        if isinstance(error, MilesError):
            raise error
        raise RewardError(
            f"the reward `{name}` failed on {_shown(label)} before the run",
            why=user_traceback(error),
            fix="fix `check_label` of the reward",
        ) from error
    bad = [
        BadRow(line=prompt.index + 1, reason=f"{_shown(prompt.label)}: {reason}")
        for prompt in prompts
        if (reason := checks.faults.get(prompt.label)) is not None
    ]
    if bad:
        raise bad_rows_error(
            f"{len(bad)} of {len(prompts)} prompts of {path} have a label that `{name}` refuses",
            path,
            bad,
            fixes=[
                "--set data.label_key=COLUMN   # where another column holds the labels",
                "--set rollout.reward=mypkg.rewards:mine   # where other labels are meant",
            ],
        )


class _Checks:
    """Checks the different labels of some prompts in daemon threads, so that a check that hangs
    does not keep the process alive."""

    def __init__(
        self, check: Callable[[Label], Label], prompts: Sequence[Labelled], *, num_threads: int
    ) -> None:
        labels = list(dict.fromkeys(prompt.label for prompt in prompts))
        self.num_labels = len(labels)
        self.num_done = 0
        self.faults: dict[Label, str] = {}
        self.failure: tuple[Label, Exception] | None = None
        """The label on which the check itself raised, and what."""
        self.in_work: list[Label] = []
        self._check = check
        self._labels = iter(labels)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name="miles-labels", daemon=True)
            for _ in range(min(NUM_THREADS, num_threads, len(labels)))
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Return True if all labels are checked, after waiting at most this long."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while self.failure is None:
            with self._lock:
                try:
                    label = next(self._labels)
                except StopIteration:
                    return
                self.in_work.append(label)
            try:
                reason = self._check(label)
            except Exception as error:  # whatever the user's check raises
                self.failure = (label, error)
                return
            with self._lock:
                self.in_work.remove(label)
                self.num_done += 1
                if reason is not None:
                    self.faults[label] = reason


def _shown(label: Label) -> str:
    if label is None:
        return "no label"
    end = label[-_SHOWN_CHARACTERS:]
    return f"the label {end if end == label else '...' + end!r}"
