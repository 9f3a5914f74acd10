"""Extracts the scalars of an event, under the names of `core.metric_names`, from the event itself
or from its line in events.jsonl. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from milescli.core.events import AdapterEvent, Event, to_record
from milescli.core.types import StepReport

Record = Mapping[str, Any]
"""A line of events.jsonl: the class name under `event`, then the fields; of an adapter's event with
`adapter`."""
STEP_EVENTS = ("StepDone", "RowStepDone")
"""An optimizer step of RL, and one over rows; scalars of both have the same names."""
_ROW_SECONDS = ("pack_s", "train_s", "save_s", "step_s")
_OF_EVERY_STEP = {"train/epoch", *(f"train/{field.name}" for field in fields(StepReport))}
_PARTS = {"reward_parts": "reward", "figures": "agent"}
"""Mappings within RolloutStats -> the prefix of their names."""


def scalars_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return (step, name -> value) of an event, or None if it carries none; scalars of an adapter's
    event belong to the adapter's run."""
    return None if isinstance(event, AdapterEvent) else scalars_in(to_record(event))


def scalars_in(record: Record) -> tuple[int, dict[str, float]] | None:
    """Return (step, name -> value) of a record, or None if it carries none."""
    make = _BY_EVENT.get(str(record.get("event")))
    if make is None:
        return None
    # None: of what the run does not do
    values = {name: value for name, value in make(record) if value is not None}
    return int(record["step"]), values


def objective_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return name -> value of the scalars that only the objective of the step reports."""
    return {
        name.removeprefix("train/"): value
        for name, value in figures.items()
        if name.startswith("train/") and name not in _OF_EVERY_STEP
    }


def figures_below(figures: Mapping[str, float], section: str) -> dict[str, float]:
    """Return name -> value of the scalars of a section, such as the parts of a reward."""
    prefix = f"{section}/"
    return {
        name.removeprefix(prefix): value
        for name, value in figures.items()
        if name.startswith(prefix)
    }


def _flat(prefix: str, fields: Record) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are numbers. Mappings of metrics are handled elsewhere, and counts of a
    histogram are no scalars."""
    for name, value in fields.items():
        if not isinstance(value, Mapping | list | tuple):
            yield f"{prefix}/{name}", value


def _report(report: Record) -> Iterator[tuple[str, Any]]:
    yield from _flat("train", report)
    yield from _flat("train", report.get("figures", {}))


def _step(record: Record) -> Iterator[tuple[str, Any]]:
    yield from _report(record["report"])
    rollout = record["rollout"]
    yield from _flat("rollout", rollout)
    for field, prefix in _PARTS.items():
        yield from _flat(prefix, rollout.get(field, {}))
    yield from _flat("time", record["seconds"])
    for prefix in ("publish", "flow"):  # older runs have none
        yield from _flat(prefix, record.get(prefix, {}))
    yield "speed/rollout_tokens_per_s", record["rollout_tokens_per_s"]
    yield "speed/train_tokens_per_s", record["train_tokens_per_s"]
    yield "weights/version", record["version"]


def _row_step(record: Record) -> Iterator[tuple[str, Any]]:
    # nobody sampled these tokens, so that nobody can differ about them
    for name, value in _report(record["report"]):
        if not name.startswith("train/logprob"):
            yield name, value
    for name in _ROW_SECONDS:
        yield f"time/{name}", record[name]
    yield "train/epoch", record["epoch"]
    yield "speed/train_tokens_per_s", record["tokens_per_s"]


def _warmup_step(record: Record) -> Iterator[tuple[str, Any]]:
    yield "warmup/loss", record["report"]["loss"]
    yield "warmup/grad_norm", record["report"]["grad_norm"]
    yield "warmup/step_s", record["step_s"]


def _validation(record: Record) -> Iterator[tuple[str, Any]]:
    yield "validation/loss", record["loss"]
    yield from _flat("validation", record.get("figures", {}))


def _evaluation(record: Record) -> Iterator[tuple[str, Any]]:
    for name in ("accuracy", "truncated_fraction", "response_tokens_mean"):
        yield f"eval/{name}", record[name]
    yield from _flat("eval", record.get("figures", {}))


_BY_EVENT = {
    "StepDone": _step,
    "RowStepDone": _row_step,
    "WarmupStepDone": _warmup_step,
    "ValidationDone": _validation,
    "EvalDone": _evaluation,
}
