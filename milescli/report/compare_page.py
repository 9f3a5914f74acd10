"""Two runs compared, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from milescli.console.theme import sparkline
from milescli.insight.case import LOSS, REWARD
from milescli.pictures.svg import Line
from milescli.report import markdown
from milescli.report.charts import Chart, column, with_trend
from milescli.report.compare import RunsCompared
from milescli.report.formats import NOTHING, accuracy, duration, figure, made_by, per_second, steps
from milescli.report.frame import Markup, chart_grid, el, framed, joined, table
from milescli.report.run_page import footer
from milescli.report.subject import Subject

_CURVES = (
    (REWARD, "Reward"),
    (LOSS, "Loss"),
    ("train/entropy", "Entropy"),
    ("rollout/response_tokens_mean", "Tokens of a response"),
    ("train/grad_norm", "Gradient norm"),
    ("time/step_s", "Seconds of a step"),
)
_ALIKE = "Recipe, data, versions, machine and plan are alike."
_SPARK = 32


def compare_page(compared: RunsCompared) -> str:
    """A whole HTML file."""
    charts = [chart for chart in _charts(compared) if chart.is_drawable]
    body: list[Markup | str] = [
        el("h1", f"{compared.a_name} and {compared.b_name}"),
        el("p", f"A: {compared.a.progress}. B: {compared.b.progress}.", cls="quiet"),
        el("div", el("p", compared.headline, cls="headline"), cls=_kind(compared)),
        *(el("p", sentence) for sentence in compared.sentences),
        el("p", " ".join(compared.notes), cls="quiet"),
        el("h2", "Figures"),
        table(["", compared.a_name, compared.b_name], list(_figures(compared))),
        el("h2", "What differs"),
        _differing(compared),
        el("h2", "Curves"),
        chart_grid(charts) if charts else el("p", "No step was done yet."),
        el("h2", "Verdicts"),
        *(
            el("p", el("strong", f"{name}: "), subject.verdict.headline)
            for name, subject in _both(compared)
        ),
        footer(compared.a),
    ]
    return framed(body, title=f"{compared.a_name} and {compared.b_name}: report", charts=charts)


def compare_markdown(compared: RunsCompared) -> str:
    """A whole Markdown file."""
    text = markdown.text
    rows = [[text(cell) for cell in row] for row in _figures(compared)]
    parts = [
        markdown.MARK,
        f"## {text(compared.a_name)} and {text(compared.b_name)}",
        f"**{text(compared.headline)}**",
        *(text(sentence) for sentence in compared.sentences),
        markdown.table(["", text(compared.a_name), text(compared.b_name)], rows),
        *_sparks(compared),
        markdown.table(
            ["differs", "", text(compared.a_name), text(compared.b_name)],
            [
                (one.what, markdown.code(one.name), markdown.code(one.a), markdown.code(one.b))
                for one in compared.differing
            ],
        )
        if compared.differing
        else _ALIKE,
        text(" ".join(compared.notes)),
        *(
            f"**{text(name)}**: {text(subject.verdict.headline)}"
            for name, subject in _both(compared)
        ),
        made_by(compared.a.made_s),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def compare_figures(compared: RunsCompared) -> dict[str, Any]:
    """For programs."""
    return {
        "a": compared.a_name,
        "b": compared.b_name,
        "headline": compared.headline,
        "differing": [asdict(one) for one in compared.differing],
        "curve": None if compared.curve is None else asdict(compared.curve),
        "held_out": [asdict(one) for one in compared.held_out],
        "speed": None if compared.speed is None else asdict(compared.speed),
        "notes": list(compared.notes),
    }


def _curves(compared: RunsCompared) -> Sequence[tuple[str, str]]:
    return [one for one in _CURVES if compared.has_rows or one[0] != LOSS]


def _kind(compared: RunsCompared) -> str:
    return "verdict good" if compared.is_seen else "verdict"


def _both(compared: RunsCompared) -> Sequence[tuple[str, Subject]]:
    return (compared.a_name, compared.a), (compared.b_name, compared.b)


def _figures(compared: RunsCompared) -> Iterator[tuple[str, str, str]]:
    both = compared.a.summary, compared.b.summary
    yield ("step", *map(steps, both))
    for word, courses, form in (
        ("reward", [one.reward for one in both], figure),
        ("loss", [one.loss for one in both] if compared.has_rows else [], figure),
        ("accuracy", [one.accuracy for one in both], accuracy),
    ):
        if any(courses):
            yield (f"{word}, last", *(form(one.last) if one else NOTHING for one in courses))
            yield (f"{word}, best", *(form(one.best) if one else NOTHING for one in courses))
    for one in compared.held_out:
        yield (
            f"{one.set}, {one.difference.num_prompts:,} shared prompts",
            f"{accuracy(one.a_accuracy)} (step {one.a_step})",
            f"{accuracy(one.b_accuracy)} (step {one.b_step})",
        )
    if (curve := compared.curve) is not None:
        yield (
            f"mean {curve.word} of {curve.num_steps:,} common steps",
            figure(curve.a_area),
            figure(curve.b_area),
        )
        if curve.level is not None:
            yield (
                f"step that reaches {curve.word} {figure(curve.level)}",
                _step(curve.a_reached),
                _step(curve.b_reached),
            )
    yield ("took", *(duration(one.elapsed_s) for one in both))
    for what, speeds in (
        ("rollout", [one.rollout_tokens_per_s for one in both]),
        ("train", [one.train_tokens_per_s for one in both]),
    ):
        if any(speeds):
            yield (f"{what} tokens/s", *map(per_second, speeds))


def _step(step: int | None) -> str:
    return NOTHING if step is None else f"{step:,}"


def _differing(compared: RunsCompared) -> Markup:
    if not compared.differing:
        return el("p", _ALIKE)
    parts = []
    for what in dict.fromkeys(one.what for one in compared.differing):
        rows = [(one.name, one.a, one.b) for one in compared.differing if one.what == what]
        parts += [el("h3", what), table(["", compared.a_name, compared.b_name], rows, cls="keys")]
    return joined(parts)


def _charts(compared: RunsCompared) -> Iterator[Chart]:
    for name, title in _curves(compared):
        trends = (
            with_trend(column(subject.history, name), name=word, color=color)
            for color, (word, subject) in enumerate(_both(compared))
        )
        yield Chart(
            name=name.replace("/", "-").replace("_", "-"),
            title=title,
            about="Of each step; faint lines are the steps, full ones their trend.",
            lines=[line for trend in trends for line in trend],
            from_zero=name != LOSS,
        )
        if name == REWARD:
            yield _accuracies(compared)


def _accuracies(compared: RunsCompared) -> Chart:
    return Chart(
        name="held-out",
        title="Held-out accuracy",
        about="Of each evaluation.",
        lines=[
            Line(
                name=word,
                color=color,
                points=[(float(one.step), one.accuracy) for one in subject.history.evaluations],
            )
            for color, (word, subject) in enumerate(_both(compared))
        ],
    )


def _sparks(compared: RunsCompared) -> Iterator[str]:
    rows = []
    for name, title in _curves(compared)[:3]:
        values = [[y for _, y in column(subject.history, name)] for _, subject in _both(compared)]
        flat = [y for one in values for y in one]
        if any(flat):
            low, high = min(flat), max(flat)
            drawn = (sparkline(one, _SPARK, low=low, high=high) for one in values)
            rows.append((title, *(f"`{line}`" if line else "" for line in drawn)))
    if rows:
        names = (markdown.text(compared.a_name), markdown.text(compared.b_name))
        yield markdown.table(["over steps", *names], rows)
