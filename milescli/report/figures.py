"""The figures of a report as plain data, for `--json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from milescli.core.private import without_paths
from milescli.report.charts import column
from milescli.report.subject import Subject


def run_figures(subject: Subject) -> dict[str, Any]:
    """Everything that is counted or decided; samples and recipe keys as they are shown."""
    curve = column(subject.history, subject.curve)
    return {
        "run": subject.name,
        "state": subject.summary.state,
        "summary": _clean(asdict(subject.summary)),
        "curve": {
            "name": subject.curve,
            "steps": [int(step) for step, _ in curve],
            "values": [value for _, value in curve],
        },
        "evaluations": [asdict(one) for one in subject.evaluations],
        "sets": [asdict(one) for one in subject.sets],
        "samples": [asdict(one) for one in subject.samples],
        "recipe": [asdict(key) for key in subject.keys if key.is_set],
        "versions": subject.versions(),
        "machine": subject.machine,
        "data": {
            name: {key: one.get(key) for key in ("num_rows", "sha256")}
            for name, one in subject.data().items()
        },
        "adapters": {one.history.name: run_figures(one) for one in subject.adapters},
    }


def _clean(value: Any) -> Any:
    """Without places of the machine, at any depth."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        return {name: _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
