"""Diagnoses of engines and ranks: engines that differ from the trainer, poor draft models,
processes that die or are silent."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from milescli.core.units import MIB, format_bytes, format_duration
from milescli.insight import series
from milescli.insight.case import Case, Finding, Level, number
from milescli.train.agreement import CORRECTED_KL, Agreement

DIFF, LARGEST = "train/logprob_diff_mean", "train/logprob_diff_max"
ACCEPTANCE = "rollout/accept_length"
FLOORS = 4.0
"""Multiple of the rounding error of this model by which the mean |engine - trainer| may differ; the
check before the first step measures the rounding error (`train.agreement`)."""
MIN_DRIFT = {"fp32": 0.002, "bf16": 0.05}
"""Smallest difference that is called drift, in nats per token: below it, a ratio is off by 0.2 % or
5 %, which does not affect clips and means. SmolLM2-135M rounds by 4e-6 in float32 and 0.05 in
bfloat16."""
EXPLAINED = 2.0
"""Multiple of the difference at the start, if number formats or routing explained that difference.
"""
GROWN = 5.0
WORSE = 0.8
DEATHS, DEATH_STEPS = 3, 50
SILENT = 10.0
"""Multiple of a usual step."""
LEAST_SILENT_S = 120.0
UNKNOWN_EVAL_S = 360.0
"""Seconds that a run's first evaluation may take, times `SILENT`: nothing is known of it."""
LEAST_GROWTH_S, LEAST_GROWTH, LEAST_GROWTH_BYTES = 1200.0, 0.1, 256 * MIB
"""Memory is judged after this many seconds, and counts as growing from this share and this size
on."""


def engine_trainer_drift(case: Case) -> Finding | None:
    """Detect that the engine's log-probs drift away from the trainer's."""
    if not case.has(DIFF, least=series.MIN_WINDOW):
        return None
    before, now = case.early(DIFF), case.recent(DIFF)
    check = case.history.check or {}
    bound = max(
        MIN_DRIFT.get(case.facts.precision, MIN_DRIFT["bf16"]),
        FLOORS * check.get("floor_mean", 0.0),
    )
    if check.get("agreement") == Agreement.EXPLAINED:  # which another finding tells
        bound = max(bound, EXPLAINED * check["diff_mean"])
    if case.recent("rollout/staleness_mean") > 0.05:
        # samples of older weights differ by what was learned since, as they did at the start
        bound = max(bound, GROWN * before)
    has_grown = now > GROWN * max(before, bound / 25) and now > bound / 5
    if now <= bound and not has_grown:
        return None
    return case.finding(
        "engine-trainer-drift",
        Level.BAD,
        "Engine and trainer drift apart",
        evidence=f"the mean |engine - trainer| of the log-probs is {number(now)} nats per token, "
        f"and was {number(before)} at the start; {case.facts.precision} runs stay below "
        f"{number(bound)}",
        advice=(
            f"apply a correction: {_correction(case)}",
            "for a mixture of experts: --set train.routing_replay=true (R3)",
            "set weights.verify=true once, to see whether a publish loses a weight",
            "if fp8 or quantised engines differ more than the policy moves: serve bf16",
        ),
        source="Yao et al., 'Your efficient RL framework secretly brings you off-policy RL "
        "training' (2025); Ma et al. (R3), arXiv 2510.11370",
        columns=(DIFF, LARGEST),
    )


def engine_trainer_mismatch(case: Case) -> Finding | None:
    """Detect a difference that the check before the first step found beyond rounding, and could
    explain."""
    check = case.history.check
    if check is None or check.get("agreement") != Agreement.EXPLAINED:
        return None
    correction = f"; {check['correction']}" if check.get("correction") else ""
    return case.finding(
        "engine-trainer-mismatch",
        Level.HINT if check["kl"] <= CORRECTED_KL else Level.WARNING,
        "Engine and trainer differ from the start by more than rounding",
        evidence=f"log-probs differ {number(check['times'])} times as much as rounding explains "
        f"({number(check['diff_mean'])} nats per token, rounding "
        f"{number(check['floor_mean'])}), KL {number(check['kl'])} (rounding "
        f"{number(check['floor_kl'])}), {check['far']:.1%} of ratios are outside of "
        f"[1/2, 2], over {check['num_tokens']} tokens{correction}",
        advice=(
            "for a mixture of experts: --set train.routing_replay=true (R3), the usual cause",
            _correction(case),
            "use one precision for both: --set train.precision=fp32 shows whether only rounding "
            "causes it; quantised engines differ more",
        ),
        source="docs/how-it-works.md, the check before the first step; Yao et al., 'Your efficient "
        "RL framework secretly brings you off-policy RL training' (2025); arXiv 2510.18855 "
        "(IcePop); Ma et al. (R3), arXiv 2510.11370",
        columns=(DIFF, LARGEST),
        steps=(check["after"], check["after"]),
    )


def _correction(case: Case) -> str:
    """Return the algorithms that correct the difference. If the policy ratio is to the engine's
    log-probs, as in a run with stale samples, only one of them does not correct it twice."""
    if case.facts.old_logprobs == "engine":
        return "--set train.algorithm=decoupled_ppo (truncated ratios, clipped about the trainer)"
    return (
        "--set train.algorithm=tis (truncated ratios), or icepop (excludes tokens that differ too "
        "much)"
    )


def draft_acceptance_falling(case: Case) -> Finding | None:
    """Detect that speculative decoding guesses worse and worse, as the policy moves away from its
    draft model."""
    if not case.has(ACCEPTANCE):
        return None
    before, now = case.early(ACCEPTANCE), case.recent(ACCEPTANCE)
    if now - 1 > WORSE * (before - 1):
        return None
    return case.finding(
        "draft-acceptance-falling",
        Level.WARNING,
        "Fewer and fewer guesses are accepted",
        evidence=f"accept_length fell from {number(before)} to {number(now)} tokens per pass",
        advice=(
            "train the draft model: --set train.draft.lr=... or train.mtp.loss_weight=...",
            "--set rollout.speculative.kind=ngram needs no draft model",
        ),
        source="Leviathan et al., arXiv 2211.17192, equation 1: speed-up by acceptance",
        columns=(ACCEPTANCE, "speed/rollout_tokens_per_s"),
    )


def workers_die(case: Case) -> Finding | None:
    """Detect that processes are replaced repeatedly."""
    last = case.steps[1]
    first = max(case.steps[0], last - DEATH_STEPS + 1)
    lost = [one for one in case.history.healings if one.step >= first - 1]
    if len(lost) < DEATHS:
        return None
    names = sorted({one.worker for one in lost})
    return case.finding(
        "workers-die",
        Level.WARNING,
        "Processes die again and again",
        evidence=f"{len(lost)} losses since step {first} ({', '.join(names)}); the last one: "
        f"{lost[-1].what}",
        advice=("miles why RUN shows what died first, with its log", "miles doctor"),
        source="events WorkerLost of the run",
        columns=("time/step_s",),
        steps=(first, last),
    )


def longest_silence_s(usual_s: float) -> float:
    """Return how long a running run may write nothing, if a step usually takes `usual_s`."""
    return max(SILENT * usual_s, LEAST_SILENT_S)


def usual_in_eval_s(step_s: float, evals_s: Iterable[float]) -> float:
    """Return how long a running run usually writes nothing while it evaluates, from the seconds of
    a step and of each evaluation until now."""
    return max(step_s, max(evals_s, default=UNKNOWN_EVAL_S))


def stalled(case: Case) -> Finding | None:
    """Detect a running run that has written nothing for far longer than a step takes."""
    if case.now_s is None or case.history.outcome is not None or not case.num_steps:
        return None
    silent_s = case.now_s - case.history.last_s
    usual_s = case.recent("time/step_s")
    if case.history.phase == "eval":
        done = (*case.history.evaluations, *case.history.validations)
        usual_s = usual_in_eval_s(usual_s, (one.seconds for one in done))
    if not silent_s > longest_silence_s(usual_s):
        return None
    return case.finding(
        "stalled",
        Level.BAD,
        "The run has been silent for a long time",
        evidence=f"the last line is {format_duration(silent_s)} old, but a step takes "
        f"{format_duration(usual_s)}; phase: {case.history.phase}",
        advice=(
            "miles why RUN",
            "check whether its driver is stopped (Ctrl-Z, SIGSTOP). Logs: miles ui, page Logs",
        ),
        source="ten times the usual step",
        columns=("time/step_s",),
    )


def memory_growing(case: Case) -> Finding | None:
    """Detect a process whose memory keeps growing after its start: each quarter of the attempt's
    time uses more than the previous one, and the last increase is at least half of the one
    before."""
    rates = dict[str, tuple[float, float, float]]()
    for name, course in case.memory.items():
        times = np.array([time for time, _ in course])
        if len(course) < 20 or times[-1] - times[0] < LEAST_GROWTH_S:
            continue
        sizes = np.array([size for _, size in course], dtype=np.float64)
        quarter = np.minimum(4 * (times - times[0]) / (times[-1] - times[0]), 3).astype(int)
        middles = [float(np.median(sizes[quarter == part])) for part in range(4) if part in quarter]
        if len(middles) < 4:
            continue
        _, second, third, last = middles
        enough = max(LEAST_GROWTH * last, LEAST_GROWTH_BYTES)
        if third > second and last - third >= 0.5 * (third - second) and last - second > enough:
            hours = (times[-1] - times[0]) / 3600
            rates[name] = (second, last, (last - second) / (hours / 2))
    if not rates:
        return None
    name, (before, now, rate) = max(rates.items(), key=lambda item: item[1][2])
    return case.finding(
        "memory-growing",
        Level.WARNING,
        "The memory of a process keeps growing",
        evidence=f"{name} grew from {format_bytes(int(before))} to {format_bytes(int(now))}, by "
        f"{format_bytes(int(rate))} per hour, without levelling off",
        advice=(
            "stop and resume the run before memory runs out: nothing is lost, and it starts afresh",
            "check what your own rewards, agents and plug-ins keep between calls",
            "memory.jsonl beside the logs has each process every ten seconds",
        ),
        source="medians of the four quarters of the attempt's time",
        columns=("time/step_s",),
    )


ALL = (
    engine_trainer_drift,
    engine_trainer_mismatch,
    stalled,
    workers_die,
    memory_growing,
    draft_acceptance_falling,
)
