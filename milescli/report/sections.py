"""The parts of the HTML report of one run, in the order in which they are read: verdict, figures,
learning, time, samples, evaluations. `records` has what lies below."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.core.history import Healing, History
from milescli.core.private import without_paths
from milescli.insight.case import LOSS, REWARD, Finding, Verdict
from milescli.insight.summary import Course, Summary
from milescli.pictures.svg import Part, spark_picture, stacked_bar
from milescli.report.charts import Chart, column
from milescli.report.chosen_samples import ShownStep
from milescli.report.formats import (
    INTERVAL,
    accuracy,
    duration,
    figure,
    interval,
    per_second,
    seen,
    share,
    steps,
)
from milescli.report.frame import Markup, chart_grid, el, joined, table
from milescli.report.subject import Subject


def verdict_card(verdict: Verdict) -> Markup:
    """The headline, and what was found."""
    kind = str(verdict.level) if verdict.level is not None else ""
    if verdict.is_learning and verdict.is_healthy:
        kind = "good"
    parts = [
        el("div", el("p", verdict.headline, cls="headline"), cls=f"verdict {kind}".strip()),
        *(_finding(finding) for finding in verdict.findings),
    ]
    if verdict.facts:
        parts.append(el("p", " ".join(verdict.facts), cls="quiet"))
    return joined(parts)


def _finding(finding: Finding) -> Markup:
    return el(
        "div",
        el("h3", finding.title, el("span", str(finding.level), cls="level")),
        el("p", seen(finding)),
        el("ul", (el("li", without_paths(advice)) for advice in finding.advice)),
        el("p", finding.source, cls="quiet"),
        cls=f"finding {finding.level}",
    )


def tiles(subject: Subject) -> Markup:
    """The figures that are asked for first."""
    summary, history = subject.summary, subject.history
    shown = [
        _tile("step", steps(summary), summary.state),
        _course("reward", summary.reward, history, REWARD),
        _course("loss", summary.loss, history, LOSS) if subject.learns_from_rows else None,
        _accuracy(subject),
        _tile("took", duration(summary.elapsed_s), _left(summary)),
        _tile(
            "rollout",
            per_second(summary.rollout_tokens_per_s),
            "tokens/s, newest steps",
            spark=[y for _, y in column(history, "speed/rollout_tokens_per_s")],
        )
        if summary.rollout_tokens_per_s
        else None,
        _tile(
            "training",
            per_second(summary.train_tokens_per_s),
            "tokens/s, " + (f"MFU {share(summary.mfu)}" if summary.mfu else "newest steps"),
            spark=[y for _, y in column(history, "speed/train_tokens_per_s")],
        )
        if summary.train_tokens_per_s
        else None,
        _tile("restarts", str(summary.restarts), "of processes that were lost")
        if summary.restarts
        else None,
    ]
    return el("div", *shown, cls="tiles")


def _tile(word: str, big: str, more: str = "", *, spark: Sequence[float] = ()) -> Markup:
    drawn = spark_picture(spark, title=f"{word} over steps") if spark else ""
    return el(
        "div",
        el("div", word, cls="word"),
        el("div", big, cls="big"),
        el("div", more, cls="more") if more else None,
        Markup(drawn),
        cls="tile",
    )


def _course(word: str, course: Course | None, history: History, name: str) -> Markup | None:
    if course is None:
        return None
    more = f"from {figure(course.first)}, best {figure(course.best)}"
    return _tile(word, figure(course.last), more, spark=[y for _, y in column(history, name)])


def _accuracy(subject: Subject) -> Markup | None:
    course = subject.summary.accuracy
    if course is None:
        return None
    more = f"held-out, step {course.last_step}; from {accuracy(course.first)}"
    values = [one.accuracy for one in subject.history.evaluations]
    return _tile("accuracy", accuracy(course.last), more, spark=values)


def _left(summary: Summary) -> str:
    left = summary.left
    return f"{duration(left.low_s)} to {duration(left.high_s)} are left" if left else ""


def learning(charts: Sequence[Chart]) -> Markup:
    """Is it learning?"""
    inside = chart_grid(charts) if charts else el("p", "No step was done yet.")
    return joined([el("h2", "Is it learning?"), inside])


def where_time_goes(subject: Subject, charts: Sequence[Chart]) -> Markup:
    """Phases, waits, losses of processes."""
    summary = subject.summary
    parts: list[Markup | str] = [el("h2", "Where does the time go?")]
    if summary.phases:
        bar = stacked_bar(
            [
                Part(
                    name=phase.name,
                    size=phase.seconds,
                    note=f"{duration(phase.seconds)}, {phase.share:.0%}",
                )
                for phase in summary.phases
            ],
            title="A step, mean of the newest ones",
        )
        parts.append(el("figure", Markup(bar), cls="bar"))
    if summary.waits:
        rows = [
            (one.who, one.for_whom, duration(one.seconds), share(one.share))
            for one in summary.waits
        ]
        parts += [
            el("h3", "Who waits"),
            table(["who", "for", "of a step", "share"], rows),
        ]
    if charts:
        parts.append(chart_grid(charts))
    if healings := subject.history.healings:
        rows = [
            (str(one.step), one.worker, without_paths(one.what), _back(one)) for one in healings
        ]
        parts += [el("h3", "What was lost"), table(["step", "who", "what", "again after"], rows)]
    return joined(parts) if len(parts) > 1 else Markup("")


def _back(healing: Healing) -> str:
    return "never" if healing.replaced_s is None else duration(healing.replaced_s - healing.lost_s)


def samples(shown: Sequence[ShownStep], *, learns_from_rows: bool) -> Markup:
    """What the model says."""
    if not shown:
        why = "It learns from rows: nothing is sampled." if learns_from_rows else "None were kept."
        return joined([el("h2", "What does it say?"), el("p", why)])
    parts: list[Markup | str] = [
        el("h2", "What does it say?"),
        el("p", "Of each step the group whose rewards differ most.", cls="quiet"),
    ]
    for one in shown:
        rewards = ", ".join(figure(reward) for reward in one.rewards)
        parts += [
            el("h3", f"Step {one.step}"),
            el("p", f"rewards of the group: {rewards}", cls="quiet") if rewards else "",
            el("pre", one.prompt),
            el("p", "label: ", el("code", one.label), cls="quiet") if one.label else "",
        ]
        parts += [
            el(
                "div",
                el("p", f"{sample.word}, reward {figure(sample.reward)}, {sample.stop_reason}"),
                el("pre", sample.text),
                cls=f"sample {sample.word}",
            )
            for sample in one.samples
        ]
    return joined(parts)


def evaluations(subject: Subject) -> Markup:
    """On held-out prompts, and on named sets."""
    parts: list[Markup | str] = []
    if subject.evaluations:
        rows = [
            (
                f"{one.step:,}",
                accuracy(one.accuracy),
                interval(one.interval),
                f"{one.num_prompts:,}",
                share(one.truncated_fraction),
                figure(one.response_tokens_mean),
                duration(one.seconds),
            )
            for one in subject.evaluations
        ]
        head = ["step", "accuracy", INTERVAL, "prompts", "truncated", "tokens", "took"]
        parts += [el("h3", "Held-out prompts"), table(head, rows)]
    if subject.sets:
        rows = [
            (
                one.set,
                f"{one.step:,}",
                f"{one.num_prompts:,}",
                name,
                accuracy(estimate.value),
                interval(estimate),
            )
            for one in subject.sets
            for name, estimate in one.estimates.items()
        ]
        head = ["set", "step", "prompts", "figure", "value", INTERVAL]
        parts += [el("h3", "By miles eval"), table(head, rows)]
    if subject.history.validations:
        rows = [(f"{one.step:,}", figure(one.loss)) for one in subject.history.validations[-12:]]
        parts += [el("h3", "Held-out rows"), table(["step", "loss"], rows)]
    return joined([el("h2", "Evaluations"), *parts]) if parts else Markup("")
