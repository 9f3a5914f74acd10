"""Diagnoses of the age of the samples."""

from __future__ import annotations

from milescli.insight import series
from milescli.insight.case import Case, Finding, Level, number

OLDEST, OLD = "rollout/staleness_max", "rollout/staleness_mean"
WASTED, STALE = "flow/wasted_tokens", "flow/stale_groups"
WASTE = 0.15
MIXED = 0.5


def staleness_over_bound(case: Case) -> Finding | None:
    """Detect samples that are older than the recipe allows."""
    if not case.has(OLDEST, least=1):
        return None
    bound, oldest = case.facts.max_staleness, series.finite(case.column(OLDEST)).max()
    if not case.facts.plan or oldest <= bound:
        return None
    return case.finding(
        "staleness-over-bound",
        Level.BAD,
        "Samples are older than allowed",
        evidence=f"rollout/staleness_max reached {number(oldest)}, but rollout.max_staleness is "
        f"{bound}",
        advice=(
            "--set rollout.stale_groups=drop discards groups that are too old",
            "please report this: a run must never exceed the limit",
        ),
        source="by definition of rollout.max_staleness",
        columns=(OLDEST, OLD),
        steps=case.steps,
    )


def stale_groups_wasted(case: Case) -> Finding | None:
    """Detect that many samples are discarded because of their age."""
    if not case.has(WASTED, least=series.MIN_WINDOW):
        return None
    wasted = series.recent(case.column(WASTED)).sum()
    used = series.recent(case.column("rollout/generated_tokens")).sum()
    if used <= 0 or (share := wasted / (wasted + used)) < WASTE:
        return None
    return case.finding(
        "stale-groups-wasted",
        Level.WARNING,
        "Samples are discarded because they are too old",
        evidence=f"{share:.0%} of the tokens of the last steps belong to groups that were "
        "discarded as too old",
        advice=(
            "raise rollout.max_staleness and weigh stale samples: --set "
            "train.algorithm=decoupled_ppo",
            "use fewer engines: rollout runs too far ahead of the trainer",
        ),
        source="flow/wasted_tokens over all that was sampled",
        columns=(WASTED, STALE),
    )


def mixed_versions(case: Case) -> Finding | None:
    """Detect that most samples mix several weight versions without a correction."""
    versions = [set(sample.record.get("versions", ())) for sample in case.samples]
    mixed = sum(len(sample_versions) > 1 for sample_versions in versions)
    is_corrected = (
        case.facts.key("train.correction.kind", "none") != "none"
        or case.facts.old_logprobs == "engine"
    )
    if not versions or mixed < MIXED * len(versions) or is_corrected or not case.facts.recipe:
        return None
    return case.finding(
        "mixed-versions",
        Level.WARNING,
        "Most samples mix several weight versions",
        evidence=f"{mixed} of the {len(versions)} newest stored samples have tokens of more than "
        "one weight version, train.old_logprobs is trainer, and train.correction.kind is none",
        advice=(
            "--set train.algorithm=decoupled_ppo, or train.old_logprobs=engine",
            "--set rollout.on_update=drain limits each sample to one version",
        ),
        source="Fu et al. (AReaL), arXiv 2505.24298, section 5.2: interrupted generation needs a "
        "decoupled objective",
        columns=(OLD, "publish/num_running"),
    )


ALL = (staleness_over_bound, stale_groups_wasted, mixed_versions)
