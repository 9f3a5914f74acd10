"""Defines the columns of a run's table: heading, metric, width, priority and number format of
each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from milescli.core.events import EvalDone
from milescli.core.units import format_count

GAP = 2
"""Blanks between columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Describes one column of the table of steps."""

    head: tuple[str, str]
    """Two lines above the figures."""
    word: str
    """Word before the figure if each step is a line of its own."""
    width: int
    rank: int
    """Narrow terminals drop the columns with the highest rank first."""
    metric: str
    """Name in metrics.jsonl; `step` for the first column."""
    form: Callable[[float | None], str]

    def write(self, figures: Mapping[str, float]) -> str:
        """Return the text of the cell. `figures`: the step's metrics by name."""
        return self.form(figures.get(self.metric))


def number(value: float | None, form: str) -> str:
    """Format a number; NaN and infinity are written as they are, and None is a dash."""
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else str(value)


def percent(share: float | None) -> str:
    """Format a share: 0.785 -> '78.5%'; a reward that is no share: 2.412 -> '2.412'"""
    if share is None:
        return "-"
    if math.isfinite(share) and not 0.0 <= share <= 1.0:
        return number(share, ".3f")
    return number(share * 100, ".1f") + "%" if math.isfinite(share) else str(share)


def rate(per_s: float | None) -> str:
    """Format a rate: 1234.5 -> '1.2k'"""
    if per_s is None:
        return "-"
    return format_count(per_s) if math.isfinite(per_s) else str(per_s)


def _column(
    head: str, word: str, metric: str, form: str | Callable[[float | None], str], *sizes: int
) -> Column:
    """Make a column. `head`: `logprob|diff max` becomes two lines; `form`: of a number; `sizes`:
    width, rank."""
    upper, _, lower = head.rpartition("|")
    write = (lambda value: number(value, form)) if isinstance(form, str) else form
    width, rank = sizes
    return Column(head=(upper, lower), word=word, width=width, rank=rank, metric=metric, form=write)


COLUMNS = (
    _column("step", "step", "step", ".0f", 5, 0),
    _column("reward", "reward", "rollout/reward_mean", ".3f", 6, 0),
    _column("loss", "loss", "train/loss", ".4f", 7, 2),
    _column("kl", "kl", "train/kl", ".4f", 6, 8),
    _column("entropy", "entropy", "train/entropy", ".3f", 7, 3),
    _column("logprob|diff max", "logprob_diff_max", "train/logprob_diff_max", ".1e", 8, 1),
    _column("response|tokens", "response_tokens", "rollout/response_tokens_mean", ".1f", 8, 4),
    _column("truncated", "truncated", "rollout/truncated_fraction", percent, 9, 7),
    _column("staleness", "staleness", "rollout/staleness_mean", ".1f", 9, 9),
    _column("rollout|tokens/s", "rollout_tokens/s", "speed/rollout_tokens_per_s", rate, 8, 5),
    _column("train|tokens/s", "train_tokens/s", "speed/train_tokens_per_s", rate, 8, 6),
    _column("rollout|s", "rollout_s", "time/rollout_s", ".2f", 7, 10),
    _column("train|s", "train_s", "time/train_s", ".2f", 6, 11),
    _column("publish|s", "publish_s", "time/publish_s", ".2f", 7, 12),
    _column("step|s", "step_s", "time/step_s", ".2f", 6, 2),
)
ACCURACY = _column("accuracy", "accuracy", "", ".3f", 8, 1)
"""Column that is filled from the evaluation after the step, if there was one."""


def fitting_columns(
    width: int, *, columns: Sequence[Column] = (COLUMNS[0], COLUMNS[1], ACCURACY, *COLUMNS[2:])
) -> list[Column]:
    """Return the most important columns that fit into `width`, in their order."""
    fitting = list(columns)
    while sum(column.width + GAP for column in fitting) - GAP > width and len(fitting) > 2:
        fitting.remove(max(fitting, key=lambda column: column.rank))
    return fitting


def figures(done: EvalDone) -> str:
    """Describe an evaluation in words."""
    parts = "".join(
        f", {name.removeprefix('reward/')} {value:.3f}"
        for name, value in done.figures.items()
        if name.startswith("reward/")
    )
    return f"{percent(done.accuracy)} of {done.num_prompts} prompts{parts}"
