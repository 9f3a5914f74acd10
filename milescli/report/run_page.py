"""The HTML report of one run."""

from __future__ import annotations

from dataclasses import replace

from milescli.pictures.svg import Line
from milescli.report import records, sections
from milescli.report.charts import Chart, column, learning_charts, time_charts, with_trend
from milescli.report.formats import accuracy, figure, made_by, moment, steps
from milescli.report.frame import Markup, chart_grid, el, framed, joined, table
from milescli.report.subject import Subject


def run_page(subject: Subject) -> str:
    """A whole file."""
    learn = learning_charts(subject.history)
    spent = time_charts(subject.history)
    together, own, further = _adapters(subject)
    body = [
        _heading(subject),
        sections.verdict_card(subject.verdict),
        records.error(subject),
        sections.tiles(subject),
        together or sections.learning(learn),
        sections.where_time_goes(subject, spent),
        own
        if subject.adapters
        else sections.samples(subject.samples, learns_from_rows=subject.learns_from_rows),
        sections.evaluations(subject),
        records.memory(subject),
        records.recipe(subject.keys),
        records.plan(subject),
        records.surroundings(subject),
        footer(subject),
    ]
    return framed(body, title=f"{subject.name}: report", charts=[*learn, *spent, *further])


def _heading(subject: Subject) -> Markup:
    """Name, recipe, how far."""
    described = next((key.value for key in subject.keys if key.name == "description"), "")
    state = f"{subject.progress}. Last event {moment(subject.history.last_s)}."
    return joined(
        [
            el("h1", subject.name),
            el("p", described) if described not in ("", "null") else None,
            el("p", state, cls="quiet"),
        ]
    )


def footer(subject: Subject) -> Markup:
    """Who made it, and when."""
    return el(
        "footer",
        f"{made_by(subject.made_s)} One file: it loads nothing from anywhere. Paths, logins and "
        "secrets are left out.",
    )


def _adapters(subject: Subject) -> tuple[Markup, Markup, list[Chart]]:
    """Of a run of several: (how each learns, what each says, all their charts)."""
    if not subject.adapters:
        return Markup(""), Markup(""), []
    chart = Chart(
        name="adapters",
        title="Reward of each adapter",
        about="Mean reward of the samples of each step.",
        lines=[_line(one, place) for place, one in enumerate(subject.adapters)],
    )
    rows = [
        (
            one.history.name,
            steps(one.summary),
            figure(one.summary.reward.last if one.summary.reward else None),
            accuracy(one.summary.accuracy.last if one.summary.accuracy else None),
            one.verdict.headline,
        )
        for one in subject.adapters
    ]
    head = ["adapter", "step", "reward", "accuracy", "verdict"]
    charts = [chart] if chart.is_drawable else []
    parts: list[Markup] = [el("h2", "Is it learning?"), table(head, rows)]
    if charts:
        parts.append(chart_grid(charts))
    by_adapter: list[Markup] = []
    for one in subject.adapters:
        own = [
            replace(drawn, name=f"{one.history.name}-{drawn.name}")
            for drawn in learning_charts(one.history)
        ]
        charts += own
        by_adapter += [
            el("h2", f"Adapter {one.history.name}"),
            sections.verdict_card(one.verdict),
            chart_grid(own) if own else Markup(""),
            sections.samples(one.samples, learns_from_rows=one.learns_from_rows),
            sections.evaluations(one),
        ]
    return joined(parts), joined(by_adapter), charts


def _line(subject: Subject, place: int) -> Line:
    history = subject.history
    return with_trend(column(history, subject.curve), name=history.name, color=place)[-1]
