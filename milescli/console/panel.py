"""Draws one frame of the live panel: the history of a run -> an object that rich draws. Pure;
called several times a second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from milescli.console import theme
from milescli.console.columns import ACCURACY, GAP, Column, fitting_columns, number, percent, rate
from milescli.core.history import History
from milescli.core.scalars import Record, figures_below, objective_figures
from milescli.core.units import format_duration

ETA_STEPS = 10
"""Number of last steps whose mean duration estimates the remaining time."""
FRAME_COLUMNS = 6
"""Border and padding of the panel."""
MAX_WIDTH = 150
MAX_ROWS = 12
OTHER_LINES = 14
"""Number of lines of the panel besides the rows of the table."""
VERDICT_FINDINGS = 2
ADAPTER_LINES = 4
"""Number of lines for each of several adapters."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

SMALLEST_SHARE = 0.01
"""Phases with a smaller share of the step are not named."""


def frame(history: History, *, elapsed_s: float, width: int, height: int) -> RenderableType:
    """Draw the whole panel for a terminal of this size. `elapsed_s`: seconds since the attempt
    began."""
    width = min(width, MAX_WIDTH)
    inner = max(20, width - FRAME_COLUMNS)
    parts: list[RenderableType] = [_bar_line(history, inner, elapsed_s)]
    last = history.columns.row(-1) if len(history.columns) else {}
    if last and not history.learns_from_rows:
        by_part = [*_means(last, "reward", inner), *_means(last, "agent", inner)]
        height -= len(by_part)
        if history.verdict is not None:
            height -= 2 + min(VERDICT_FINDINGS, len(history.verdict["findings"]))
        parts += [Text(), _trend(history, inner), *by_part]
        parts += [Text(), _table(history, inner, height)]
        parts += [Text(), _phases(last, inner), _health(last, inner)]
    elif last:
        parts += [Text(), _losses(history, inner), Text(), _row_health(last, inner)]
    elif len(history.warmup):
        parts += [Text(), _warmup(history, inner)]
    if history.verdict is not None:
        parts += [Text(), *_verdict(history.verdict, inner)]
    num_adapters = max(1, (height - OTHER_LINES) // ADAPTER_LINES + 1)
    for one in [*history.adapters.values()][:num_adapters]:
        parts += [Text(), *_adapter(one, inner, elapsed_s)]
    style, word = _state(history)
    return Panel(
        Group(*parts),
        title=Text.assemble((history.name, theme.TITLE)),
        title_align="left",
        subtitle=Text(word, style=style),
        subtitle_align="right",
        border_style=theme.BAD if history.outcome == "failed" else theme.BORDER,
        padding=(1, 2),
        width=width,
    )


def _verdict(given: Record, width: int) -> list[Text]:
    """Return a line that says whether the run is learning, and one line for each problem."""
    style = theme.WARN if given["findings"] or given["is_learning"] is False else theme.GOOD
    lines = [Text.assemble(("verdict ", theme.LABEL), (given["headline"], style))]
    shown = [*given["findings"].values()][:VERDICT_FINDINGS]
    lines += [Text(f"        ! {text}", style=theme.QUIET) for text in shown]
    return [_cut(line, width) for line in lines]


def _adapter(history: History, width: int, elapsed_s: float) -> list[RenderableType]:
    """Draw one of several adapters: its progress, its reward, and its last step."""
    parts: list[RenderableType] = [Text(history.name, style=theme.TITLE)]
    parts.append(_bar_line(history, width, elapsed_s))
    if len(history.columns):
        parts += [_trend(history, width)]
    elif len(history.warmup):
        parts.append(_warmup(history, width))
    return parts


def _state(history: History) -> tuple[str, str]:
    if history.outcome is None:
        return theme.ACCENT, _phase(history)[0]
    styles = {"done": theme.GOOD, "stopped": theme.WARN}
    return styles.get(history.outcome, theme.BAD), history.outcome


def _phase(history: History) -> tuple[str, str]:
    """Return (phase, detail) of the newest phase, of the run or of one of its adapters."""
    newest = history
    for one in history.adapters.values():
        if one.phase and not one.phase_s < newest.phase_s:  # neither is known at first
            newest = one
    if newest is history:
        return history.phase or "start", history.phase_detail
    return newest.phase, f"{newest.name}: {newest.phase_detail}"


def _counted(history: History) -> tuple[str, int, int]:
    """Return (unit, number done, total number) of the progress; `("", 0, 0)` before the first
    step."""
    if len(history.columns):
        return "step", history.step, history.num_steps or 0
    if len(history.warmup):
        return "warmup", history.warmup.steps[-1], history.warmup_steps
    return "", 0, 0


def _left_s(history: History) -> float | None:
    """Return the estimated remaining seconds, by the last steps; None if nothing remains, or no
    step was done."""
    steps = (history.num_steps or 0) - history.step
    if history.outcome is not None or not len(history.columns) or steps <= 0:
        return None
    seconds = history.columns.get("time/step_s")[-ETA_STEPS:]
    return sum(seconds) / len(seconds) * steps


def _bar_line(history: History, width: int, elapsed_s: float) -> Text:
    word, done, wanted = _counted(history)
    phase, detail = _phase(history)
    counted = f"{word} {done}/{wanted}" if word else phase
    times = format_duration(elapsed_s)
    if (left_s := _left_s(history)) is not None:
        times += f" · {format_duration(left_s)} left"
    if not word:
        turn = SPINNER[int(elapsed_s * 8) % len(SPINNER)] if history.outcome is None else " "
        room = max(0, width - len(times) - len(counted) - 6)
        return Text.assemble(
            (f"{turn} ", theme.ACCENT),
            (counted, theme.TITLE),
            f"  {detail[:room].ljust(room)}  ",
            (times, theme.QUIET),
        )
    length = max(4, width - len(counted) - len(times) - 4)
    share = done / wanted
    full = round(length * min(1.0, share))
    color = theme.GOOD if share >= 1 else theme.ACCENT
    bar = Text.assemble(("━" * full, color), ("─" * (length - full), theme.BORDER))
    return Text.assemble((counted, theme.TITLE), "  ", bar, "  ", (times, theme.QUIET))


def _trend(history: History, width: int) -> Text:
    rewards = history.columns.get("rollout/reward_mean")
    first, last = rewards[0], rewards[-1]
    words = f"reward  {number(first, '.3f')} → {number(last, '.3f')}  "
    accuracy = _accuracy(history)
    bounded = all(0 <= reward <= 1 for reward in rewards if math.isfinite(reward))
    room = max(8, width - len(words) - (len(accuracy) + 3 if accuracy else 0))
    limits = {"low": 0.0, "high": 1.0} if bounded else {}
    line = theme.sparkline(rewards, min(room, 60), **limits)
    gap = max(3, width - len(words) - len(line) - len(accuracy))
    return Text.assemble(
        ("reward  ", theme.LABEL),
        f"{number(first, '.3f')} → ",
        (f"{number(last, '.3f')}  ", "bold"),
        (line, theme.REWARD),
        (" " * gap if accuracy else ""),
        (accuracy, ""),
    )


def _means(figures: Mapping[str, float], section: str, width: int) -> list[Text]:
    """Draw one line with the mean of each part of the reward, or of each metric of agents, if there
    are any."""
    means = figures_below(figures, section)
    words = "  ".join(f"{name} {number(mean, '.3f')}" for name, mean in means.items())
    return [Text(f"        {words}"[:width], style=theme.QUIET)] if words else []


def _accuracy(history: History) -> str:
    if not history.evaluations:
        return ""
    first, last = history.evaluations[0], history.evaluations[-1]
    if len(history.evaluations) == 1:
        return f"accuracy  {percent(last.accuracy)}"
    return f"accuracy  {percent(first.accuracy)} → {percent(last.accuracy)}"


def _table(history: History, width: int, height: int) -> Table:
    columns = fitting_columns(width)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 0),
        show_edge=False,
        header_style=theme.HEADER,
        collapse_padding=True,
    )
    for place, column in enumerate(columns):
        room = column.width + (GAP if place else 0)
        table.add_column("\n".join(column.head), justify="right", width=room, no_wrap=True)
    rows = max(1, min(MAX_ROWS, height - OTHER_LINES))
    steps = history.columns.steps[-rows:]
    for place, step in enumerate(steps, -len(steps)):
        figures = {"step": step, **history.columns.row(place)}
        table.add_row(
            *(_cell(column, figures, history) for column in columns),
            style="" if place == -1 else theme.QUIET,
        )
    return table


def _cell(column: Column, figures: Mapping[str, float], history: History) -> Text:
    if column is ACCURACY:
        own = [one.accuracy for one in history.evaluations if one.step == figures["step"]]
        return Text(percent(own[-1]), style="not dim green") if own else Text()
    text = column.write(figures)
    if text in ("nan", "inf", "-inf"):
        return Text(text, style=f"not dim {theme.BAD}")
    bound = history.check["bound_max"] if history.check else math.inf
    if column.word == "logprob_diff_max" and figures[column.metric] > bound:
        return Text(text, style=f"not dim {theme.WARN}")
    return Text(text)


def _phases(figures: Mapping[str, float], width: int) -> Text:
    """Draw where the last step's time went: `rollout 2.10 s  train 0.84 s ...`, and a bar in
    proportion."""
    parts = [(word, figures[f"time/{word}_s"], style) for word, style in theme.PHASES.items()]
    total = sum(spent for _, spent, _ in parts if math.isfinite(spent))
    shown = [
        (word, spent, style)
        for word, spent, style in parts
        if math.isfinite(spent) and spent > SMALLEST_SHARE * total
    ]
    words = Text("   ").join(
        Text.assemble(("■ ", style), (f"{word} ", theme.LABEL), f"{spent:.2f} s")
        for word, spent, style in shown
    )
    room = width - words.cell_len - 3
    if room < 12 or total <= 0:
        return _cut(words, width)
    length, edge, bar = min(room, 40), 0.0, Text()
    for _, spent, style in shown:
        start, edge = edge, edge + length * spent / total
        bar.append("▀" * (int(edge) - int(start)), style)
    return Text.assemble(words, "   ", bar)


def _health(figures: Mapping[str, float], width: int) -> Text:
    speeds = [rate(figures[f"speed/{who}_tokens_per_s"]) for who in ("rollout", "train")]
    stale, most = (figures[f"rollout/staleness_{which}"] for which in ("mean", "max"))
    has_speed_columns = any(column.word == "train_tokens/s" for column in fitting_columns(width))
    facts = [
        *([] if has_speed_columns else [("tokens/s", f"rollout {speeds[0]}, train {speeds[1]}")]),
        ("staleness", f"{number(stale, '.1f')} (max {number(most, '.0f')})"),
        ("zero variance", f"{percent(figures['rollout/zero_variance_fraction'])} of groups"),
        ("truncated", percent(figures["rollout/truncated_fraction"])),
        ("clipped", percent(figures.get("train/clip_fraction"))),
        ("grad norm", number(figures["train/grad_norm"], ".2f")),
        ("lr", number(figures["train/lr"], ".1e")),
    ]
    while _facts(facts).cell_len > width and len(facts) > 1:
        facts.pop()
    return _cut(_facts(facts), width)


def _losses(history: History, width: int) -> Text:
    losses = history.columns.get("train/loss")
    words = f"{number(losses[0], '.3f')} → {number(losses[-1], '.3f')}  "
    held_out = ""
    if history.validations:
        start, now = history.validations[0], history.validations[-1]
        held_out = f"   held out  {number(start.loss, '.3f')} → {number(now.loss, '.3f')}"
    if accuracy := _accuracy(history):
        held_out += f"   {accuracy}"
    room = max(8, min(60, width - len(words) - 6 - len(held_out)))
    line = theme.sparkline(losses, room)
    return Text.assemble(("loss  ", theme.LABEL), words, (line, theme.ACCENT), held_out)


def _row_health(figures: Mapping[str, float], width: int) -> Text:
    own = objective_figures(figures)
    facts = [
        *((name.replace("_", " "), number(value, ".3f")) for name, value in own.items()),
        ("epoch", f"{figures['train/epoch']:.2f}"),
        ("tokens/s", rate(figures["speed/train_tokens_per_s"])),
        ("grad norm", number(figures["train/grad_norm"], ".2f")),
        ("lr", number(figures["train/lr"], ".1e")),
    ]
    return _cut(_facts(facts), width)


def _facts(facts: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join(Text.assemble((f"{word} ", theme.LABEL), text) for word, text in facts)


def _warmup(history: History, width: int) -> Text:
    losses, last = history.warmup.get("loss"), history.warmup.row(-1)
    words = f"loss  {number(losses[0], '.3f')} → {number(losses[-1], '.3f')}  "
    step_s = last["step_s"]
    speed = f"   {rate(last['num_tokens'] / step_s)} tokens/s" if step_s > 0 else ""
    line = theme.sparkline(losses, max(8, min(60, width - len(words) - len(speed))))
    return Text.assemble(
        (words[:6], theme.LABEL), words[6:], (line, theme.ACCENT), (speed, theme.QUIET)
    )


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
