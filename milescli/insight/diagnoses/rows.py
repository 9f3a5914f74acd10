"""Diagnoses of runs that train on rows of a file: the loss stays, or held-out rows get worse."""

from __future__ import annotations

from milescli.insight.case import LOSS, Case, Finding, Level, number

ENOUGH = 20
WORSE = 1.05


def overfitting(case: Case) -> Finding | None:
    """Detect that the training loss falls while the held-out loss rises."""
    validations = case.history.validations
    if len(validations) < 3:
        return None
    best = min(validations, key=lambda one: one.loss)
    last = validations[-1]
    if last.loss < WORSE * best.loss or validations[-2].loss < best.loss or last is best:
        return None
    if validations[-2] is best or not case.progress.is_rising:
        return None
    return case.finding(
        "overfitting",
        Level.BAD,
        "It memorises the rows",
        evidence=f"the held-out loss was {number(best.loss)} at step {best.step} and is "
        f"{number(last.loss)} at step {last.step}, while the training loss fell from "
        f"{number(case.early(LOSS))} to {number(case.recent(LOSS))}",
        advice=(
            f"use step {best.step}: miles export RUN --step {best.step} --to DIR",
            "fewer epochs, more rows, --set train.optimizer.weight_decay=0.1, or LoRA: "
            "--set train.lora.rank=16",
        ),
        source="Prechelt, 'Early stopping - but when?' (1998): generalisation loss",
        columns=(LOSS, "validation/loss"),
        steps=(best.step, last.step),
    )


def loss_flat(case: Case) -> Finding | None:
    """Detect that the loss over rows does not fall."""
    if not case.history.learns_from_rows or not case.has(LOSS, least=ENOUGH):
        return None
    if case.is_early(least=ENOUGH):
        return None
    trend = case.progress
    if trend.is_rising:
        return None
    return case.finding(
        "loss-flat",
        Level.WARNING,
        "The loss does not fall",
        evidence=f"it went from {number(case.early(LOSS))} to {number(case.recent(LOSS))}: a "
        f"change of {number(-trend.change, '+.3g')} with a standard error of "
        f"{number(trend.error)}",
        advice=(
            "raise train.optimizer.lr (three times as much)",
            "check that the loss mask covers the responses: miles data check shows what is learned",
        ),
        source="Newey and West, Econometrica 55 (1987), 703: the line's slope against its error",
        columns=(LOSS, "train/lr"),
        steps=case.steps,
    )


ALL = (overfitting, loss_flat)
