"""Formats numbers for a report. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from milescli import __version__
from milescli.core.private import without_paths
from milescli.core.units import format_count, format_duration
from milescli.insight.case import Finding
from milescli.insight.summary import Summary
from milescli.rollout.evaluation.statistics import LEVEL, Estimate

NOTHING = "-"
INTERVAL = f"{LEVEL:.0%} interval"
"""Name of an interval."""


def figure(value: float | None) -> str:
    """Format a number: 0.8125 -> 0.812; 12 -> 12; 3.1e-05; - for none."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def share(value: float | None) -> str:
    """Format a share: 0.412 -> 41.2%"""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.1%}"


def accuracy(value: float | None) -> str:
    """Format an accuracy as a share; a reward outside 0 to 1 as a number."""
    return share(value) if value is not None and 0.0 <= value <= 1.0 else figure(value)


def interval(estimate: Estimate | None) -> str:
    """Format the ends of an interval: 38.1% to 47.2%; empty for none."""
    return "" if estimate is None else f"{accuracy(estimate.low)} to {accuracy(estimate.high)}"


def duration(seconds: float | None) -> str:
    """Format seconds: 1 m 15 s"""
    return NOTHING if seconds is None or not math.isfinite(seconds) else format_duration(seconds)


def per_second(value: float | None) -> str:
    """Format a rate: 12.3k"""
    return NOTHING if value is None or not math.isfinite(value) else format_count(value)


def moment(seconds: float | None) -> str:
    """Format a time, seconds since 1970: 2026-11-25 22:14 UTC"""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def finding_text(finding: Finding) -> str:
    """Describe a finding: entropy rose from 0.5 to 3.17 nats a token (steps 65 to 80)."""
    where = f" (steps {finding.steps[0]} to {finding.steps[1]})" if finding.steps else ""
    return f"{without_paths(finding.evidence)}{where}."


def signature(made_s: float) -> str:
    """Say who made a report and when: Made by miles 0.1.0 at 2026-11-25 22:14 UTC."""
    return f"Made by miles {__version__} at {moment(made_s)}."


def steps(summary: Summary) -> str:
    """Format the number of steps done: 12 of 30"""
    wanted = f" of {summary.num_steps:,}" if summary.num_steps else ""
    return f"{summary.step:,}{wanted}"
