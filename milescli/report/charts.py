"""Which figures of a run are drawn, and how: a chart is plain data, of which the page makes an SVG
that shows everywhere and, where scripts run, a chart to look into. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from milescli.core.history import History
from milescli.insight.case import LOSS, REWARD
from milescli.pictures.svg import Line, Point, finite, thinned

MOST_POINTS = 800
"""Of a line, in the file."""
_SMOOTH_FROM = 24
"""Steps from which a line is drawn as the mean of its neighbours, with the steps faint behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Its id on the page, behind `chart-`."""
    title: str
    about: str
    """A sentence below it."""
    lines: Sequence[Line]
    from_zero: bool = True

    @property
    def is_drawable(self) -> bool:
        """There is a point."""
        return any(finite(line.points) for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    name: str
    title: str
    about: str
    columns: Mapping[str, str]
    """Name of metrics.jsonl -> word of the legend."""


_OF_ROLLOUT = (
    _Wanted(
        name="entropy",
        title="Entropy",
        about="Of the policy, in nats a token. Near 0 it says the same always, and finds nothing "
        "new.",
        columns={"train/entropy": "entropy"},
    ),
    _Wanted(
        name="groups",
        title="Groups that teach nothing",
        about="Share of groups in which all rewards are equal: too easy, or too hard.",
        columns={"rollout/zero_variance_fraction": "of all groups"},
    ),
    _Wanted(
        name="length",
        title="Tokens of a response",
        about="Mean and longest. A length that only grows is often a reward that pays for it.",
        columns={
            "rollout/response_tokens_mean": "mean",
            "rollout/response_tokens_max": "longest",
        },
    ),
    _Wanted(
        name="mismatch",
        title="Engine against trainer",
        about="Mean difference of log-probs of the same tokens: what sampled against what learns.",
        columns={"train/logprob_diff_mean": "mean difference"},
    ),
)
_OF_TRAINING = (
    _Wanted(
        name="gradient",
        title="Gradient norm",
        about="Before clipping.",
        columns={"train/grad_norm": "norm"},
    ),
    _Wanted(name="kl", title="KL", about="To the reference.", columns={"train/kl": "KL"}),
    _Wanted(
        name="clip",
        title="Clipped",
        about="Share of tokens whose ratio was clipped.",
        columns={"train/clip_fraction": "of all tokens"},
    ),
)
_OF_TIME = (
    _Wanted(
        name="seconds",
        title="Seconds of a step",
        about="All of it, and its largest parts.",
        columns={
            "time/step_s": "step",
            "time/rollout_s": "rollout",
            "time/train_s": "train",
        },
    ),
    _Wanted(
        name="speed",
        title="Tokens a second",
        about="While sampling, and while training.",
        columns={
            "speed/rollout_tokens_per_s": "rollout",
            "speed/train_tokens_per_s": "train",
        },
    ),
    _Wanted(
        name="staleness",
        title="Staleness",
        about="Weight versions that samples are older than the trainer.",
        columns={"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
    ),
)


def learning_charts(history: History) -> list[Chart]:
    """Is it learning? The first is the one that matters most."""
    wanted = _OF_TRAINING if history.learns_from_rows else (*_OF_ROLLOUT, *_OF_TRAINING)
    first = _loss(history) if history.learns_from_rows else _reward(history)
    charts = [first, *_charts(history, wanted), _warmup(history)]
    return [chart for chart in charts if chart.is_drawable]


def time_charts(history: History) -> list[Chart]:
    """Where does the time go?"""
    return [chart for chart in _charts(history, _OF_TIME) if chart.is_drawable]


def column(history: History, name: str) -> list[Point]:
    """(step, value) of each step that has one."""
    return finite(list(zip(history.columns.steps, history.columns.get(name), strict=True)))


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean of each point and its neighbours, a twentieth of all on either side."""
    half, count = max(1, len(points) // 40), len(points)
    window, own = np.ones(2 * half + 1), slice(half, half + count)
    sums = np.convolve([y for _, y in points], window)[own]  # a running sum would keep any spike
    means = sums / np.convolve(np.ones(count), window)[own]
    return [(x, float(mean)) for (x, _), mean in zip(points, means, strict=True)]


def with_trend(points: Sequence[Point], *, name: str, color: int = 0) -> list[Line]:
    """The steps, and where there are many the trend over them."""
    few = thinned(points, MOST_POINTS)
    if len(points) < _SMOOTH_FROM:
        return [Line(name=name, points=few, color=color)]
    trend = thinned(smoothed(points), MOST_POINTS)
    return [
        Line(name=f"{name}, each step", points=few, color=color, is_faint=True),
        Line(name=name, points=trend, color=color),
    ]


def _reward(history: History) -> Chart:
    evals = [(float(one.step), one.accuracy) for one in history.evaluations]
    return Chart(
        name="reward",
        title="Reward",
        about="Mean reward of the samples of each step, and of the held-out prompts of "
        "evaluations.",
        lines=[
            *with_trend(column(history, REWARD), name="mean reward"),
            Line(name="held-out accuracy", points=evals, color=1, as_dots=True),
        ],
    )


def _loss(history: History) -> Chart:
    held_out = [(float(one.step), one.loss) for one in history.validations]
    return Chart(
        name="loss",
        title="Loss",
        about="Of the rows of each step, and of rows that are not learned from.",
        lines=[
            *with_trend(column(history, LOSS), name="loss"),
            Line(name="held-out loss", points=held_out, color=1, as_dots=True),
        ],
        from_zero=False,
    )


def _warmup(history: History) -> Chart:
    columns = history.warmup
    points = finite(list(zip(columns.steps, columns.get("loss"), strict=True)))
    return Chart(
        name="warmup",
        title="Warm-up: loss",
        about="Of the supervised steps before reinforcement learning.",
        lines=[Line(name="loss", points=thinned(points, MOST_POINTS), color=2)],
    )


def _charts(history: History, wanted: Sequence[_Wanted]) -> Iterator[Chart]:
    for one in wanted:
        found = {word: column(history, name) for name, word in one.columns.items()}
        lines = [
            Line(name=word, points=thinned(points, MOST_POINTS), color=place)
            for place, (word, points) in enumerate(found.items())
            if any(value for _, value in points)
        ]
        yield Chart(name=one.name, title=one.title, about=one.about, lines=lines)
