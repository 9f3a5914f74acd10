"""Judges whether a run is learning, and if not, why: all diagnoses, the worst first, and a
headline. Pure; the live table, `miles status`, the page and the report use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from milescli.checkpoint.run_dir import RunDir
from milescli.core.history import History
from milescli.insight import series
from milescli.insight.case import CEILING, LOSS, REWARD, Case, Finding, Level, Verdict, number
from milescli.insight.diagnoses import ALL
from milescli.insight.facts import RunFacts
from milescli.insight.memory import courses_of
from milescli.insight.samples import KeptSample, read_last, read_samples, sample_steps

SAMPLE_STEPS = 3
"""Number of newest steps whose samples are read."""
TOO_EARLY = 10
"""Number of steps below which a run cannot be judged."""
_ORDER = (Level.BAD, Level.WARNING, Level.HINT)
_SYMPTOMS = {
    "reward-flat": ("groups-too-hard", "groups-too-easy", "no-gradient", "no-learning-rate"),
    "groups-too-hard": ("reward-falling",),
    "no-gradient": ("groups-too-hard", "groups-too-easy"),
    "loss-flat": ("no-gradient", "no-learning-rate"),
}
"""Finding -> findings that explain it and replace it."""
_ENDS = ("done", "stopped", "failed", "killed")
_BAD_ENDS = {"failed": " The run failed.", "killed": " The run was killed."}


def verdict_of(
    history: History,
    *,
    facts: RunFacts | None = None,
    samples: Sequence[KeptSample] = (),
    first_samples: Sequence[KeptSample] = (),
    now_s: float | None = None,
    state: str | None = None,
    memory: Mapping[str, Sequence[tuple[float, int]]] | None = None,
) -> Verdict:
    """Return the verdict. `samples`: of the newest steps; `first_samples`: of the first one;
    `now_s`: the time if the run is running, to see whether it is silent; `state`: of `state_of`,
    None: as its events say; `memory`: see `Case`."""
    case = Case(
        history=history,
        facts=facts or RunFacts(),
        samples=samples,
        first_samples=first_samples,
        now_s=now_s,
        memory=memory or {},
    )
    found = [finding for diagnose in ALL if (finding := diagnose(case)) is not None]
    names = {finding.name for finding in found}
    own = [one for one in found if names.isdisjoint(_SYMPTOMS.get(one.name, ()))]
    own.sort(key=lambda one: _ORDER.index(one.level))
    is_learning = _is_learning(case) if "held-out-falls" not in names else False
    outcome = history.outcome if state is None else state if state in _ENDS else None
    return Verdict(
        step=history.step,
        num_steps=case.num_steps,
        headline=_headline(case, own, is_learning=is_learning, outcome=outcome),
        is_learning=is_learning,
        findings=tuple(own),
        facts=tuple(_facts(case)),
    )


def read_verdict(
    run: RunDir,
    history: History,
    *,
    facts: RunFacts,
    now_s: float | None = None,
    state: str | None = None,
) -> Verdict:
    """Return the verdict on a run and its samples on disk; with several adapters, that of the worst
    one, by name. Otherwise as `verdict_of`."""
    if history.adapters:
        return _of_adapters(run, history, facts=facts, now_s=now_s, state=state)
    steps = sample_steps(run)
    return verdict_of(
        history,
        facts=facts,
        samples=read_last(run, num_steps=SAMPLE_STEPS),
        first_samples=read_samples(run, steps[0]) if len(steps) > SAMPLE_STEPS else (),
        now_s=now_s,
        state=state,
        memory=courses_of(run),
    )


def _of_adapters(
    run: RunDir, history: History, *, facts: RunFacts, now_s: float | None, state: str | None
) -> Verdict:
    verdicts = {
        name: read_verdict(
            RunDir(run.adapters_dir / name), own, facts=facts, now_s=now_s, state=state
        )
        for name, own in history.adapters.items()
    }
    findings = [
        replace(finding, title=f"{name}: {finding.title}")
        for name, verdict in verdicts.items()
        for finding in verdict.findings
    ]
    findings.sort(key=lambda one: _ORDER.index(one.level))
    learning = [verdict.is_learning for verdict in verdicts.values()]
    return Verdict(
        step=min((verdict.step for verdict in verdicts.values()), default=0),
        num_steps=min((verdict.num_steps for verdict in verdicts.values()), default=0),
        headline=" ".join(f"{name}: {verdict.headline}" for name, verdict in verdicts.items()),
        is_learning=None if None in learning else all(learning),
        findings=tuple(findings),
    )


def _is_learning(case: Case) -> bool | None:
    if case.num_steps < TOO_EARLY:
        return True if case.accuracy.is_rising else None
    if case.is_rising:
        return True
    is_unsure = case.is_at_ceiling or case.is_early(least=TOO_EARLY)
    return None if is_unsure else False


def _headline(
    case: Case, findings: Sequence[Finding], *, is_learning: bool | None, outcome: str | None
) -> str:
    history = case.history
    if not case.num_steps:
        return _before_steps(history, outcome)
    what = _course(case)
    worst = next((one for one in findings if one.level is not Level.HINT), None)
    if is_learning is None and case.is_early(least=TOO_EARLY) and not case.is_at_ceiling:
        sentence = f"Too early to say: {what}."
    elif is_learning is None:
        sentence = f"There is little left to learn: {what}."
    elif is_learning:
        sentence = f"It is learning: {what}."
    else:
        sentence = f"It is not learning: {what}."
    end = _BAD_ENDS.get(outcome or "", "")
    if worst is None:
        return (
            f"{sentence}{end}" if end or is_learning is False else f"{sentence} Nothing is wrong."
        )
    lead = "But" if is_learning else "First"
    return f"{sentence} {lead}: {worst.title[0].lower()}{worst.title[1:]}.{end}"


def _before_steps(history: History, outcome: str | None) -> str:
    if outcome is not None:
        return f"No step was done before the run ended: {outcome}."
    if len(history.warmup):
        return f"No step yet: warm-up step {history.warmup.steps[-1]} of {history.warmup_steps}."
    return f"No step yet: {history.phase or 'it has not begun'}."


def _course(case: Case) -> str:
    history = case.history
    name = LOSS if history.learns_from_rows else REWARD
    values = series.finite(case.column(name))
    word = "loss" if history.learns_from_rows else "reward"
    if not len(values):
        return f"the {word} is not a number at any of {case.num_steps} steps"
    few = case.num_steps < TOO_EARLY
    first, last = (values[0], values[-1]) if few else (case.early(name), case.recent(name))
    count = f"{case.num_steps} step" + "s" * (case.num_steps != 1)
    words = f"{word} {number(first)} → {number(last)} over {count}"
    found = history.evaluations
    if len(found) > 1:
        words += f", held-out {_share(found[0].accuracy)} → {_share(found[-1].accuracy)}"
    elif history.validations and len(history.validations) > 1:
        validations = history.validations
        words += f", held-out loss {number(validations[0].loss)} → {number(validations[-1].loss)}"
    return words


def _share(value: float) -> str:
    """Format a share: 0.785 -> '78.5%'; other values, as rewards may be: 2.412 -> '2.41'."""
    return f"{value:.1%}" if 0.0 <= value <= 1.0 else number(value)


def _facts(case: Case) -> list[str]:
    """Return observations that look odd and are normal."""
    facts = list[str]()
    if case.history.learns_from_rows or not case.num_steps:
        return facts
    losses = series.recent(case.column(LOSS))
    is_strict = case.facts.updates_per_step == 1 and case.facts.max_staleness == 0
    if is_strict and len(losses) and abs(losses).mean() < 0.05 and case.facts.plan:
        facts.append(
            "The loss is near 0, and that is normal: at strictly on-policy steps the ratio is 1 "
            "and advantages of a group add up to 0. Look at the reward."
        )
    entropy = case.recent("train/entropy")
    if entropy < 0.1 and case.is_at_ceiling:
        facts.append(
            f"Entropy is low ({number(entropy)}) and the reward is at least {CEILING}: the "
            "policy is certain because it is right."
        )
    return facts
