"""Shows a run's summary on the screen, once or repeatedly until the run ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict

from milescli.checkpoint.run_dir import RunDir
from milescli.console import theme
from milescli.console.columns import number, percent, rate
from milescli.console.output import Line, Mode, Output, redrawn, show_lines
from milescli.core.history import History
from milescli.core.units import format_bytes, format_duration
from milescli.insight.case import Finding, Level, Verdict
from milescli.insight.facts import read_facts
from milescli.insight.reader import RunReader
from milescli.insight.summary import Course, Phase, Summary, representative_history, summarize

EVERY_S = 2.0
LABEL = 10
"""Number of columns of the labels before the figures."""
SPARK, BAR = 40, 40
SHOWN_MEMORY = 4
_STATE = {"running": theme.ACCENT, "done": theme.GOOD, "stopped": theme.WARN}
_MARKS = {Level.BAD: theme.BAD, Level.WARNING: theme.WARN, Level.HINT: theme.QUIET}


def show_status(run: RunDir, output: Output) -> None:
    """Show the run's current state."""
    reader = RunReader(run)
    reader.update()
    summary = summarize(run, reader.history, read_facts(run))
    output.json("status", asdict(summary))
    if output.mode is Mode.QUIET:
        _show_bare(summary, output)
    elif output.mode is Mode.HUMAN:
        show_lines([*lines_of(summary, reader.history)], output)


def watch_status(run: RunDir, output: Output) -> None:
    """Show the state until the run ends, or Ctrl-C. On a terminal that cannot redraw, prints only
    when a step is done, the run ends, or a new problem appears."""
    reader, last = RunReader(run), None
    with redrawn(output) as redraw, suppress(KeyboardInterrupt):
        while True:
            reader.update()
            summary = summarize(run, reader.history, read_facts(run))
            wrong = [finding.name for finding in summary.verdict.findings]
            now = (summary.step, summary.state, wrong)
            if redraw is not None:
                redraw([*lines_of(summary, reader.history)])
            elif now != last:
                last = now
                output.json("status", asdict(summary))
                if output.mode is Mode.QUIET:
                    _show_bare(summary, output)
                elif output.mode is Mode.HUMAN:
                    show_lines([_head(summary), [summary.verdict.headline]], output)
            if summary.state != "running":
                return
            time.sleep(EVERY_S)


def _show_bare(summary: Summary, output: Output) -> None:
    counted = f"{summary.step}/{summary.num_steps or '?'}"
    output.text("\t".join([summary.name, summary.state, counted, summary.verdict.headline]))


def lines_of(summary: Summary, history: History) -> Iterator[Line]:
    """Yield the lines of the screen."""
    shown = representative_history(history)
    yield _head(summary)
    yield _bar(summary)
    yield []
    yield from _verdict(summary.verdict)
    yield []
    if len(shown.warmup) and not len(shown.columns):
        losses = shown.warmup.get("loss")
        course = f"{number(losses[0], '.3f')} → {number(losses[-1], '.3f')}  "
        spark = (theme.sparkline(losses, SPARK), theme.ACCENT)
        yield [("loss".ljust(LABEL), theme.LABEL), course, spark]
    if summary.reward is not None:
        rewards = shown.columns.get("rollout/reward_mean")
        yield _course("reward", summary.reward, rewards, style=theme.REWARD)
    if summary.learns_from_rows and summary.loss is not None:
        losses = shown.columns.get("train/loss")
        yield _course("loss", summary.loss, losses, style=theme.ACCENT)
    if summary.accuracy is not None:
        accuracies = [one.accuracy for one in shown.evaluations]
        yield _course("held-out", summary.accuracy, accuracies, style=theme.REWARD)
    for name, own in history.adapters.items():
        yield _labelled(name, f"step {own.step}/{own.num_steps or '?'}")
    yield from _speed(summary)
    yield from _health(summary)


def _head(summary: Summary) -> Line:
    style = _STATE.get(summary.state, theme.BAD)
    phase = f"   {summary.phase}" if summary.state == "running" and summary.phase else ""
    detail = f": {summary.phase_detail}" if phase and summary.phase_detail else ""
    trunk = f"   forked from {summary.forked_from}" if summary.forked_from else ""
    shown = (phase + detail, ""), (trunk, theme.QUIET)
    return [(summary.name, theme.TITLE), "   ", (summary.state, style), *shown]


def _bar(summary: Summary) -> Line:
    counted = f"step {summary.step}/{summary.num_steps or '?'}"
    full = round(BAR * min(1.0, summary.share_done or 0.0))
    pieces: list[str | tuple[str, str]] = [
        (counted.ljust(LABEL + 2), theme.TITLE),
        ("━" * full, theme.ACCENT),
        ("─" * (BAR - full), theme.BORDER),
    ]
    if summary.elapsed_s is not None:
        pieces.append(f"  {format_duration(summary.elapsed_s)}")
    if (left := summary.left) is not None:
        spread = f"{format_duration(left.low_s)} to {format_duration(left.high_s)}"
        pieces += [f", {format_duration(left.mean_s)} left", (f" ({spread})", theme.QUIET)]
    return pieces


def _verdict(verdict: Verdict) -> Iterator[Line]:
    style = theme.GOOD if verdict.is_healthy else _MARKS[verdict.findings[0].level]
    yield [(verdict.headline, style)]
    for finding in verdict.findings:
        yield from _finding(finding)
    for fact in verdict.facts:
        yield [("  i ", theme.QUIET), (fact, theme.QUIET)]


def _finding(finding: Finding) -> Iterator[Line]:
    mark = {Level.BAD: "✗", Level.WARNING: "!", Level.HINT: "·"}[finding.level]
    where = f" ({finding.name})"
    yield [
        (f"  {mark} ", _MARKS[finding.level]),
        (finding.title, theme.TITLE),
        (where, theme.QUIET),
        f": {finding.evidence}",
    ]
    yield [("      try: ", theme.LABEL), (finding.advice[0], "")]


def _course(word: str, course: Course, values: Sequence[float], *, style: str) -> Line:
    limits = {"low": 0.0, "high": 1.0} if all(0 <= value <= 1 for value in values) else {}
    is_share = word == "held-out"
    first, last, best = (
        percent(value) if is_share else number(value, ".3f")
        for value in (course.first, course.last, course.best)
    )
    return [
        (word.ljust(LABEL), theme.LABEL),
        f"{first} → ",
        (last, theme.TITLE),
        "  ",
        (theme.sparkline(values, SPARK, **limits), style),
        (f"  best {best} at step {course.best_step}", theme.QUIET),
    ]


def _speed(summary: Summary) -> Iterator[Line]:
    speeds = [
        f"{name} {rate(value)}"
        for name, value in (
            ("rollout", summary.rollout_tokens_per_s),
            ("training", summary.train_tokens_per_s),
        )
        if value is not None
    ]
    if speeds:
        mfu = f"   MFU {summary.mfu:.0%}" if summary.mfu is not None else ""
        yield _labelled("tokens/s", ", ".join(speeds) + mfu)
    if summary.phases:
        yield [("a step", theme.LABEL), " " * (LABEL - 6), *_phases(summary.phases)]
    if summary.run_phases:
        shares = (f"{one.name} {one.share:.0%}" for one in summary.run_phases if one.share >= 0.01)
        yield _labelled("the run", ", ".join(shares))


def _phases(phases: Sequence[Phase]) -> Iterator[str | tuple[str, str]]:
    shown = [phase for phase in phases if phase.share >= 0.01]
    edge = 0.0
    for phase in shown:
        start, edge = edge, edge + BAR * phase.share
        yield ("▀" * (int(edge) - int(start)), theme.PHASES[phase.name])
    words = (f"{phase.name} {phase.share:.0%} ({phase.seconds:.2f} s)" for phase in shown)
    yield "  " + ", ".join(words)


def _health(summary: Summary) -> Iterator[Line]:
    if summary.waits:
        waits = (
            f"{wait.who} for {wait.for_whom} {wait.seconds:.2f} s ({wait.share:.0%})"
            for wait in summary.waits
        )
        yield _labelled("waits", "; ".join(waits))
    if summary.staleness_mean is not None:
        max_text = f" (max {summary.staleness_max})"
        yield _labelled("staleness", f"{summary.staleness_mean:.1f}{max_text}")
    is_running = summary.state == "running"
    if summary.memory:
        parts = [
            f"{one.worker} {format_bytes(one.used_bytes if is_running else one.peak_bytes)}"
            + (f" of {format_bytes(one.planned_bytes)} planned" if one.planned_bytes else "")
            for one in summary.memory[:SHOWN_MEMORY]
        ]
        more = len(summary.memory) - SHOWN_MEMORY
        yield _labelled(
            "memory" if is_running else "at most",
            ", ".join(parts) + (f", {more} more" if more > 0 else ""),
        )
    saved = summary.checkpoint_step
    checkpoint = "none yet" if saved is None else f"of step {saved}"
    yield _labelled("restarts", f"{summary.restarts}   checkpoint {checkpoint}")
    if summary.mirror is not None:
        copied = summary.mirrored_step
        copy = "no checkpoint yet" if copied is None else f"checkpoint of step {copied}"
        behind = (saved or 0) - (copied or 0)
        lag = f", {behind} steps behind" if saved is not None and saved != copied else ""
        yield _labelled("copy", f"{copy} in {summary.mirror}/{summary.name}{lag}")


def _labelled(word: str, text: str) -> Line:
    return [(word.ljust(LABEL), theme.LABEL), text]
