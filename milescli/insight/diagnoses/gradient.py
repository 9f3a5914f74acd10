"""Diagnoses of the optimizer: losses that are not finite, gradient spikes, no gradient, no learning
rate."""

from __future__ import annotations

import math

import numpy as np

from milescli.insight import series
from milescli.insight.case import FEW_STEPS, LOSS, Case, Finding, Level, number

NORM = "train/grad_norm"
SPIKE = 8.0
"""Multiple of the median over the previous steps that have a gradient."""
BEFORE = 20
ZERO_NORM = 1e-9
"""Gradient norm that counts as zero: no parameter's gradient exceeds it, and a tenth of Adam's
epsilon moves nothing."""
SPIKES = 2
"""Number of spikes in the newest 50 steps; one may be chance."""


def not_finite(case: Case) -> Finding | None:
    """Detect a loss or a gradient that is NaN or infinite."""
    steps = np.asarray(case.history.columns.steps)
    bad = ~np.isfinite(case.column(LOSS)) | ~np.isfinite(case.column(NORM))
    error = case.history.error or {}
    is_said = "not finite" in str(error.get("what", ""))
    if not bad.any() and not is_said:
        return None
    where = steps[bad]
    seen = (
        f"loss or gradient norm is not finite at {len(where)} steps, first at {where[0]}"
        if len(where)
        else str(error["what"])
    )
    return case.finding(
        "not-finite",
        Level.BAD,
        "The loss is not a number",
        evidence=seen,
        advice=(
            "launch again with a lower rate: --set train.optimizer.lr=...",
            "--set train.optimizer.clip_grad=1.0",
            "read the samples of that step: the usual cause is an empty or a very long response",
        ),
        source="IEEE 754: NaN spreads to every weight in one update",
        columns=(LOSS, NORM),
        steps=(int(where[0]), int(where[-1])) if len(where) else None,
    )


def gradient_spikes(case: Case) -> Finding | None:
    """Detect steps whose gradient is many times that of the steps before."""
    norms, steps = case.column(NORM), case.history.columns.steps
    spikes = [
        place
        for place in range(max(FEW_STEPS, len(norms) - series.MAX_WINDOW), len(norms))
        if norms[place] > SPIKE * _usual(norms, place)
    ]
    if len(spikes) < SPIKES:
        return None
    worst = max(spikes, key=lambda place: norms[place])
    usual = _usual(norms, worst)
    return case.finding(
        "gradient-spikes",
        Level.WARNING,
        "The gradient spikes",
        evidence=f"{len(spikes)} of the last {min(len(norms), series.MAX_WINDOW)} steps have a "
        f"gradient norm of more than {SPIKE:g} times the median of the {BEFORE} before; "
        f"step {steps[worst]}: {number(norms[worst])}, compared with {number(usual)}",
        advice=(
            "--set train.optimizer.clip_grad=1.0 (or lower) limits the effect of one step",
            "lower train.optimizer.lr, or increase train.optimizer.warmup_steps",
            "read the samples of those steps: one long or repetitive response is often the cause",
        ),
        source="Pascanu et al., arXiv 1211.5063, section 3.2: clipping by the norm",
        columns=(NORM,),
        steps=(steps[spikes[0]], steps[spikes[-1]]),
    )


def _usual(norms: np.ndarray, place: int) -> float:
    """Return the median norm of the previous steps with a gradient; infinite before the first.
    Steps whose groups all have equal rewards have none: half of the last steps of a model that has
    learned its prompts."""
    before = norms[max(0, place - BEFORE) : place]
    usual = series.median(before[before > ZERO_NORM])
    return math.inf if math.isnan(usual) else usual


def no_gradient(case: Case) -> Finding | None:
    """Detect that nothing is learned, because all gradients are zero."""
    norms = series.recent(case.column(NORM))
    if len(norms) < series.MIN_WINDOW or norms.max() > ZERO_NORM:
        return None
    return case.finding(
        "no-gradient",
        Level.BAD,
        "The gradient is zero",
        evidence=f"the gradient norm of the last {len(norms)} steps is at most "
        f"{number(norms.max())}",
        advice=(
            "check whether all rewards of each group are equal, so that nothing separates good "
            "from bad: see rollout/zero_variance_fraction",
            "check whether the loss mask covers any token: see the samples, coloured by loss mask",
        ),
        source="with equal rewards in a group all advantages are 0: Shao et al., arXiv 2402.03300, "
        "section 4.1.2",
        columns=(NORM, "rollout/zero_variance_fraction"),
    )


def no_learning_rate(case: Case) -> Finding | None:
    """Detect a learning rate that has decayed to zero, or always was."""
    rates = series.recent(case.column("train/lr"))
    if len(rates) < series.MIN_WINDOW or rates.max() > 0:
        return None
    return case.finding(
        "no-learning-rate",
        Level.BAD,
        "The learning rate is zero",
        evidence=f"train/lr of the last {len(rates)} steps is 0",
        advice=(
            "--set train.optimizer.min_lr=1e-7, or train.optimizer.schedule=constant",
            "a schedule falls to zero over train.steps: set it before the run",
        ),
        source="by definition: an update is lr times a direction",
        columns=("train/lr",),
    )


ALL = (not_finite, no_learning_rate, no_gradient, gradient_spikes)
