"""Gives hints where the time goes, and what would be faster; nothing is wrong."""

from __future__ import annotations

import math

from milescli.insight import series
from milescli.insight.case import Case, Finding, Level

ROLLOUT, TRAIN, STEP = "time/rollout_s", "time/train_s", "time/step_s"
BOUND = 0.7
"""Share of the step."""
SIDE = 0.25


def rollout_bound(case: Case) -> Finding | None:
    """Detect that the trainer waits for samples most of the time, and say how many devices would
    balance the two."""
    title = "Rollout takes most of the time"
    return _side(case, ROLLOUT, "rollout-bound", title, (*_balance(case), *_FASTER_ROLLOUT))


def train_bound(case: Case) -> Finding | None:
    """Detect that training takes most of the time, and say how many devices would balance it with
    rollout."""
    title = "Training takes most of the time"
    return _side(case, TRAIN, "train-bound", title, (*_balance(case), *_FASTER_TRAINING))


def publish_slow(case: Case) -> Finding | None:
    """Detect that publishing weights to the engines takes a large part of the step."""
    return _side(case, "time/publish_s", "publish-slow", "Publishing weights is slow", _PUBLISH)


def save_slow(case: Case) -> Finding | None:
    """Detect that checkpoints delay the steps."""
    return _side(case, "time/save_s", "save-slow", "Saving is slow", _SAVE)


def balanced_engines(rollout_s: float, train_s: float, *, engines: int, trainer: int) -> int:
    """Return the number of devices for rollout that makes the step shortest, if the speed of each
    side is proportional to its devices. One after the other, the step is R/x + T/(n - x), which is
    least at x = n sqrt(R) / (sqrt(R) + sqrt(T)); R, T: seconds times devices. At least one for
    each."""
    total = engines + trainer
    root_r, root_t = math.sqrt(rollout_s * engines), math.sqrt(train_s * trainer)
    return min(total - 1, max(1, round(total * root_r / (root_r + root_t))))


def balanced_overlapping(busy_s: float, train_s: float, *, engines: int, trainer: int) -> int:
    """Return the number of devices for rollout that runs ahead of the trainer: both take equally
    long at x = n R / (R + T); see `balanced_engines`."""
    total = engines + trainer
    work_r, work_t = busy_s * engines, train_s * trainer
    return min(total - 1, max(1, round(total * work_r / (work_r + work_t))))


def _balance(case: Case) -> list[str]:
    facts = case.facts
    engines, trainer = facts.num_engine_devices, facts.num_trainer_devices
    if facts.is_colocated or not engines or not case.has(ROLLOUT, least=series.MIN_WINDOW):
        return []
    rollout_s, train_s = case.recent(ROLLOUT), case.recent(TRAIN)
    if facts.max_staleness:
        idle_s = case.recent("flow/idle_s")
        busy_s = max(case.recent(STEP) - (0.0 if math.isnan(idle_s) else idle_s), 1e-9)
        wanted = balanced_overlapping(busy_s, train_s, engines=engines, trainer=trainer)
    else:
        wanted = balanced_engines(rollout_s, train_s, engines=engines, trainer=trainer)
    if wanted == engines:
        return [f"{engines} devices for rollout and {trainer} for training are balanced"]
    return [
        f"of {engines + trainer} devices, {wanted} for rollout and {engines + trainer - wanted} "
        f"for training would be balanced (now {engines} and {trainer})"
    ]


def _side(
    case: Case, column: str, name: str, title: str, advice: tuple[str, ...]
) -> Finding | None:
    if case.history.learns_from_rows or not case.has(column, least=series.MIN_WINDOW):
        return None
    share = case.recent(column) / case.recent(STEP)
    if not share > (BOUND if column in (ROLLOUT, TRAIN) else SIDE):
        return None
    return case.finding(
        name,
        Level.HINT,
        title,
        evidence=f"{share:.0%} of a step of {case.recent(STEP):.1f} s",
        advice=advice,
        source="seconds of the newest steps, by name of the phase",
        columns=(column, STEP),
    )


_FASTER_ROLLOUT = (
    "let rollout run ahead: --set rollout.max_staleness=1",
    "use speculative decoding: --set rollout.speculative.kind=ngram",
    "if a few long responses delay a step: --set rollout.order=done --set rollout.max_staleness=2",
)
_FASTER_TRAINING = (
    "use larger microbatches: --set train.max_tokens_per_microbatch=...",
    "miles profile RUN --steps 2 shows where the time goes",
)
_PUBLISH = (
    "use a faster channel: --set weights.channel=..., or a larger weights.bucket_mib",
    "--set rollout.on_update=continue does not wait for running samples",
)
_SAVE = (
    "save less often: --set checkpoint.every=..., with checkpoint.async_save=true",
    "use a faster disk for run.dir",
)

ALL = (rollout_bound, train_bound, publish_slow, save_slow)
