"""The columns of a run: one word each, the same in table, lines and JSON; how wide, how important,
how written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from milescli.core.events import EvalDone, StepDone
from milescli.core.units import format_count

GAP = 2
"""Blanks between columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of a step."""

    head: tuple[str, str]
    """Two lines above the figures."""
    word: str
    """Before the figure, where each step is a line of its own."""
    width: int
    rank: int
    """Narrow terminals drop the highest first."""
    write: Callable[[StepDone], str]


def number(value: float | None, form: str) -> str:
    """A figure; NaN and infinity are said as they are, and what the objective does not show is a
    dash."""
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else str(value)


def percent(share: float | None) -> str:
    """0.785 -> '78.5%'; what is no share, as rewards may be: 2.412 -> '2.412'"""
    if share is None:
        return "-"
    if math.isfinite(share) and not 0.0 <= share <= 1.0:
        return number(share, ".3f")
    return number(share * 100, ".1f") + "%" if math.isfinite(share) else str(share)


def rate(per_s: float) -> str:
    """1234.5 -> '1.2k'"""
    return format_count(per_s) if math.isfinite(per_s) else str(per_s)


def _column(
    head: str, word: str, *, width: int, rank: int, write: Callable[[StepDone], str]
) -> Column:
    """`head`: `logprob|diff max` stands on two lines."""
    upper, _, lower = head.rpartition("|")
    return Column(head=(upper, lower), word=word, width=width, rank=rank, write=write)


def _figure(path: str, form: str) -> Callable[[StepDone], str]:
    """`report.loss` of a step, written in this form."""
    return lambda done: number(attrgetter(path)(done), form)


def _objective_figure(name: str, form: str) -> Callable[[StepDone], str]:
    """A figure of the objective, by its name; a dash where it shows none of this name."""
    return lambda done: number(done.report.figures.get(name), form)


COLUMNS = (
    _column("step", "step", width=5, rank=0, write=lambda done: str(done.step)),
    _column("reward", "reward", width=6, rank=0, write=_figure("rollout.reward_mean", ".3f")),
    _column("loss", "loss", width=7, rank=2, write=_figure("report.loss", ".4f")),
    _column("kl", "kl", width=6, rank=8, write=_objective_figure("kl", ".4f")),
    _column("entropy", "entropy", width=7, rank=3, write=_objective_figure("entropy", ".3f")),
    _column(
        "logprob|diff max",
        "logprob_diff_max",
        width=8,
        rank=1,
        write=_figure("report.logprob_diff_max", ".1e"),
    ),
    _column(
        "response|tokens",
        "response_tokens",
        width=8,
        rank=4,
        write=_figure("rollout.response_tokens_mean", ".1f"),
    ),
    _column(
        "truncated",
        "truncated",
        width=9,
        rank=7,
        write=lambda done: percent(done.rollout.truncated_fraction),
    ),
    _column(
        "staleness", "staleness", width=9, rank=9, write=_figure("rollout.staleness_mean", ".1f")
    ),
    _column(
        "rollout|tokens/s",
        "rollout_tokens/s",
        width=8,
        rank=5,
        write=lambda done: rate(done.rollout_tokens_per_s),
    ),
    _column(
        "train|tokens/s",
        "train_tokens/s",
        width=8,
        rank=6,
        write=lambda done: rate(done.train_tokens_per_s),
    ),
    _column("rollout|s", "rollout_s", width=7, rank=10, write=_figure("seconds.rollout_s", ".2f")),
    _column("train|s", "train_s", width=6, rank=11, write=_figure("seconds.train_s", ".2f")),
    _column("publish|s", "publish_s", width=7, rank=12, write=_figure("seconds.publish_s", ".2f")),
    _column("step|s", "step_s", width=6, rank=2, write=_figure("seconds.step_s", ".2f")),
)

ACCURACY = _column("accuracy", "accuracy", width=8, rank=1, write=lambda done: "")
"""Filled from the evaluation after the step, where there was one."""


def that_fit(
    width: int, *, columns: Sequence[Column] = (COLUMNS[0], COLUMNS[1], ACCURACY, *COLUMNS[2:])
) -> list[Column]:
    """The most important columns that fit into `width`, in their order."""
    kept = list(columns)
    while sum(column.width + GAP for column in kept) - GAP > width and len(kept) > 2:
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def figures(done: EvalDone) -> str:
    """An evaluation in words."""
    parts = "".join(
        f", {name.removeprefix('reward/')} {value:.3f}"
        for name, value in done.figures.items()
        if name.startswith("reward/")
    )
    return f"{percent(done.accuracy)} of {done.num_prompts} prompts{parts}"
