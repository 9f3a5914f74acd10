"""Diagnoses of how the policy moves: entropy, KL to the reference, ratios and clipping."""

from __future__ import annotations

import math

from milescli.insight import series
from milescli.insight.case import Case, Finding, Level, number

ENTROPY, KL, RATIO, CLIPPED = (
    "train/entropy",
    "train/kl",
    "train/ratio_mean",
    "train/clip_fraction",
)
COLLAPSED, LOW = 0.2, 0.1
"""Entropy relative to its start; entropy in nats per token: 1.1 choices, whatever the
vocabulary."""
EXPLODED, MUCH = 2.5, 0.5
"""Entropy relative to its start; entropy in nats per token: 1.6 times as many choices."""
KL_FAR, KL_GROWN, KL_LOST = 0.5, 4.0, 2.0
"""KL in nats per token at which the reference finds each token of the policy 1.6 times less likely;
ratio to the KL halfway; KL in nats per token that is always too large (7 times less likely)."""
MIN_RATIO_CHANGE = 2.0**-22
"""Two spacings of float32 at 1, for the mean of ratios that are all exactly 1. Even a small
learning rate on many tokens (ratios that are off by 1e-4 either way, 100,000 tokens) moves the mean
by only 3e-7."""
MAX_CLIPPED = {"token": 0.2, "sequence": 0.6, "sequence_token": 0.6}
"""GSPO clips whole sequences, and two orders of magnitude more tokens (arXiv 2507.18071, section
5.2)."""


def entropy_collapse(case: Case) -> Finding | None:
    """Detect that all samples of a prompt become alike before the policy answers correctly."""
    if not case.has(ENTROPY) or case.is_at_ceiling:
        return None
    before, now = case.early(ENTROPY), case.recent(ENTROPY)
    if now > LOW or now > COLLAPSED * before:
        return None
    return case.finding(
        "entropy-collapse",
        Level.BAD,
        "Entropy collapses",
        evidence=f"entropy fell from {number(before)} to {number(now)} nats per token, and the "
        f"mean reward is {number(case.recent('rollout/reward_mean'))}: the samples of a "
        "group hardly differ",
        advice=(
            "raise the upper clip: --set train.clip_high=0.28 (DAPO's clip-higher)",
            "add an entropy bonus: --set train.entropy_coef=0.001, or train.entropy_target",
            "--set train.surrogate=clip_cov or kl_cov restricts the tokens that cause it",
            "lower train.optimizer.lr",
        ),
        source="Yu et al. (DAPO), arXiv 2503.14476, section 3.1; Cui et al., arXiv 2505.22617",
        columns=(ENTROPY, "rollout/reward_mean"),
    )


def entropy_explosion(case: Case) -> Finding | None:
    """Detect that the policy becomes random."""
    if not case.has(ENTROPY):
        return None
    before, now = case.early(ENTROPY), case.recent(ENTROPY)
    if now < EXPLODED * before or now < before + MUCH:
        return None
    return case.finding(
        "entropy-explosion",
        Level.BAD,
        "Entropy explodes",
        evidence=f"entropy rose from {number(before)} to {number(now)} nats per token",
        advice=(
            "lower train.optimizer.lr, or --set train.entropy_coef=0",
            "a KL to the reference: --set train.kl_coef=0.001",
            "if long wrong responses have large advantages: --set train.aggregation=token_mean",
        ),
        source="a policy whose entropy grows without bound loses what it was trained on: Yu et al. "
        "(DAPO), arXiv 2503.14476, figure 2",
        columns=(ENTROPY,),
    )


def kl_runaway(case: Case) -> Finding | None:
    """Detect that the policy moves away from its reference faster and faster."""
    if not case.has(KL):
        return None
    values = series.finite(case.column(KL))
    half = series.mean(values[len(values) // 3 : 2 * len(values) // 3])
    now = case.recent(KL)
    if now < KL_FAR or (now < KL_GROWN * max(half, 0.0) and now < KL_LOST):
        return None
    return case.finding(
        "kl-runaway",
        Level.BAD,
        "The policy runs away from its reference",
        evidence=f"the KL to the reference is {number(now)} nats per token; in the middle third "
        f"of the run it was {number(half)}",
        advice=(
            "raise train.kl_coef, or lower train.optimizer.lr",
            "if the KL is noisy: --set train.kl_estimator=k3 and train.kl_unbiased=true",
        ),
        source="Stiennon et al., arXiv 2009.01325, section 4.3; Gao et al., arXiv 2210.10760",
        columns=(KL, "rollout/reward_mean"),
    )


def ratio_stuck(case: Case) -> Finding | None:
    """Detect that the policy always equals the one that sampled, although a step makes several
    updates."""
    updates = case.facts.updates_per_step
    if updates < 2 or not case.has(RATIO, least=series.MIN_WINDOW):
        return None
    ratios, rates = case.column(RATIO), series.recent(case.column("train/lr"))
    if (
        abs(series.finite(ratios) - 1).max() > MIN_RATIO_CHANGE
        or not len(rates)
        or rates.max() == 0
    ):
        return None
    return case.finding(
        "ratio-stuck",
        Level.BAD,
        "The ratio is always 1",
        evidence=f"train/ratio_mean is within 1 +- {MIN_RATIO_CHANGE:.1g} at all {case.num_steps} "
        f"steps, although each has {updates} updates",
        advice=(
            "the old log-probs are computed again at each update: --set train.old_logprobs=trainer",
            "a custom objective must use `Stream.OLD`, not the log-probs of the current pass",
            "check whether anything is trained: see train/grad_norm, and which weights are frozen",
        ),
        source="Schulman et al. (PPO), arXiv 1707.06347, equation 6: the ratio leaves 1 with the "
        "first update",
        columns=(RATIO, CLIPPED),
        steps=case.steps,
    )


def clip_fraction_high(case: Case) -> Finding | None:
    """Detect that a large part of a step's tokens is clipped."""
    bound = MAX_CLIPPED.get(str(case.facts.key("train.ratio", "token")), math.inf)
    now = case.recent(CLIPPED) if case.has(CLIPPED, least=series.MIN_WINDOW) else 0.0
    if now < bound:
        return None
    return case.finding(
        "clip-fraction-high",
        Level.WARNING,
        "Many tokens are clipped",
        evidence=f"{now:.0%} of the trained tokens of the last steps are clipped",
        advice=(
            "lower train.optimizer.lr, or use fewer train.updates_per_step",
            "lower rollout.max_staleness: the ratio of old samples starts away from 1",
            "--set train.clip_high=... if the policy should be able to move further",
        ),
        source="Schulman et al. (PPO), arXiv 1707.06347, section 3: no gradient beyond the clip",
        columns=(CLIPPED, RATIO),
    )


ALL = (entropy_collapse, entropy_explosion, kl_runaway, ratio_stuck, clip_fraction_high)
