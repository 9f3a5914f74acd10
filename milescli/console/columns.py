"""The columns of a run: one word each, the same in table, lines and JSON; how wide, how important,
how written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """A figure; NaN and infinity are said as they are, and what the objective does not tell is a
    dash."""
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else str(value)


def percent(share: float | None) -> str:
    """0.785 -> '78.5%'"""
    if share is None:
        return "-"
    return number(share * 100, ".1f") + "%" if math.isfinite(share) else str(share)


def rate(per_s: float) -> str:
    """1234.5 -> '1.2k'"""
    return format_count(per_s) if math.isfinite(per_s) else str(per_s)


COLUMNS = (
    Column(head=("", "step"), word="step", width=5, rank=0, write=lambda done: str(done.step)),
    Column(
        head=("", "reward"),
        word="reward",
        width=6,
        rank=0,
        write=lambda done: number(done.rollout.reward_mean, ".3f"),
    ),
    Column(
        head=("", "loss"),
        word="loss",
        width=7,
        rank=2,
        write=lambda done: number(done.report.loss, ".4f"),
    ),
    Column(
        head=("", "kl"),
        word="kl",
        width=6,
        rank=8,
        write=lambda done: number(done.report.figures.get("kl"), ".4f"),
    ),
    Column(
        head=("", "entropy"),
        word="entropy",
        width=7,
        rank=3,
        write=lambda done: number(done.report.figures.get("entropy"), ".3f"),
    ),
    Column(
        head=("logprob", "diff max"),
        word="logprob_diff_max",
        width=8,
        rank=1,
        write=lambda done: number(done.report.logprob_diff_max, ".1e"),
    ),
    Column(
        head=("response", "tokens"),
        word="response_tokens",
        width=8,
        rank=4,
        write=lambda done: number(done.rollout.response_tokens_mean, ".1f"),
    ),
    Column(
        head=("", "truncated"),
        word="truncated",
        width=9,
        rank=7,
        write=lambda done: percent(done.rollout.truncated_fraction),
    ),
    Column(
        head=("", "staleness"),
        word="staleness",
        width=9,
        rank=9,
        write=lambda done: number(done.rollout.staleness_mean, ".1f"),
    ),
    Column(
        head=("rollout", "tokens/s"),
        word="rollout_tokens/s",
        width=8,
        rank=5,
        write=lambda done: rate(done.rollout_tokens_per_s),
    ),
    Column(
        head=("train", "tokens/s"),
        word="train_tokens/s",
        width=8,
        rank=6,
        write=lambda done: rate(done.train_tokens_per_s),
    ),
    Column(
        head=("rollout", "s"),
        word="rollout_s",
        width=7,
        rank=10,
        write=lambda done: number(done.seconds.rollout_s, ".2f"),
    ),
    Column(
        head=("train", "s"),
        word="train_s",
        width=6,
        rank=11,
        write=lambda done: number(done.seconds.train_s, ".2f"),
    ),
    Column(
        head=("publish", "s"),
        word="publish_s",
        width=7,
        rank=12,
        write=lambda done: number(done.seconds.publish_s, ".2f"),
    ),
    Column(
        head=("step", "s"),
        word="step_s",
        width=6,
        rank=2,
        write=lambda done: number(done.seconds.step_s, ".2f"),
    ),
)

ACCURACY = Column(head=("", "accuracy"), word="accuracy", width=8, rank=1, write=lambda done: "")
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
    return f"{percent(done.accuracy)} of {done.num_prompts} prompts"
