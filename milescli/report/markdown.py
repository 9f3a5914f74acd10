"""The Markdown report of one run, and that of two compared, short enough for a pull request:
verdict, tables, sparklines as text, two samples. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from milescli.console.theme import sparkline
from milescli.core.private import without_paths
from milescli.insight.case import LOSS, REWARD, Verdict
from milescli.report.chosen_samples import ShownStep
from milescli.report.compare import ALIKE, RunsCompared, figure_rows
from milescli.report.formats import (
    INTERVAL,
    accuracy,
    duration,
    figure,
    finding_text,
    interval,
    per_second,
    share,
    signature,
    steps,
)
from milescli.report.subject import Subject

MARK = "<!-- miles report -->"
"""Invisible mark that identifies a file as a report."""
_SPARK = 32
_SPECIAL = re.compile(r"([\\`*_\[\]<>&|~])")


def run_markdown(subject: Subject) -> str:
    """Return the Markdown file of one run."""
    parts = [
        MARK,
        f"## {text(subject.name)}",
        *_verdict(subject.verdict),
        table(["", ""], list(_figures(subject))),
        *_curves(subject),
        *_adapters(subject),
        *_time(subject),
        *_evaluations(subject),
        *_samples(subject.samples),
        *_recipe(subject),
        _signature(subject),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(verdict: Verdict) -> list[str]:
    lines = [
        f"- **{finding.level}: {text(finding.title)}.** {text(finding_text(finding))} "
        f"Try: {text(without_paths(finding.advice[0])) if finding.advice else 'nothing'}"
        for finding in verdict.findings
    ]
    return [f"**{text(verdict.headline)}**", "\n".join(lines)]


def _signature(subject: Subject) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in subject.versions().items())
    origin = "; ".join(part for part in (subject.machine, versions) if part)
    return ". ".join(part for part in (text(origin), signature(subject.made_s)) if part)


def _figures(subject: Subject) -> Iterator[tuple[str, str]]:
    summary = subject.summary
    yield "state", subject.progress
    if summary.forked_from:
        yield "forked from", summary.forked_from
    for word, course, form in (
        ("reward", summary.reward, figure),
        ("loss", summary.loss if subject.learns_from_rows else None, figure),
        ("accuracy", summary.accuracy, accuracy),
    ):
        if course is not None:
            best = f", best {form(course.best)} at step {course.best_step}"
            yield word, f"{form(course.first)} → {form(course.last)}{best}"
    yield "took", duration(summary.elapsed_s)
    if summary.rollout_tokens_per_s:
        yield "rollout tokens/s", per_second(summary.rollout_tokens_per_s)
    if summary.train_tokens_per_s:
        yield "train tokens/s", per_second(summary.train_tokens_per_s)
    if summary.mfu is not None:
        yield "MFU", share(summary.mfu)
    if summary.restarts:
        lost = f", {summary.lost_samples} samples lost" if summary.lost_samples else ""
        yield "restarts", f"{summary.restarts}{lost}"
    for name, words in subject.data_words().items():
        yield f"data: {name}", text(words)


def _curves(subject: Subject) -> Iterator[str]:
    names = (
        ("rollout/reward_mean", "reward"),
        ("train/loss", "loss"),
        ("train/entropy", "entropy"),
        ("rollout/response_tokens_mean", "response tokens"),
        ("rollout/zero_variance_fraction", "groups that teach nothing"),
        ("time/step_s", "seconds of a step"),
    )
    rows = []
    for name, word in names:
        values = [value for _, value in subject.points(name)]
        if any(values) and (word != "loss" or subject.learns_from_rows):
            drawn = f"`{sparkline(values, _SPARK)}`"
            rows.append((word, figure(values[0]), drawn, figure(values[-1])))
    if rows:
        yield table(["", "first", "over steps", "last"], rows)


def _adapters(subject: Subject) -> Iterator[str]:
    rows = []
    for one in subject.adapters:
        values = [value for _, value in one.points(one.curve)]
        rows.append(
            (
                text(one.history.name),
                steps(one.summary),
                f"`{sparkline(values, _SPARK)}`" if values else "",
                figure(values[-1]) if values else "",
                accuracy(one.summary.accuracy.last if one.summary.accuracy else None),
                text(one.verdict.headline),
            )
        )
    if rows:
        yield table(["adapter", "step", "over steps", "last", "accuracy", "verdict"], rows)


def _time(subject: Subject) -> Iterator[str]:
    phases = subject.summary.phases
    if phases:
        head = ["a step", *(phase.name for phase in phases)]
        row = [
            duration(sum(phase.seconds for phase in phases)),
            *(f"{duration(phase.seconds)} ({phase.share:.0%})" for phase in phases),
        ]
        yield table(head, [row])


def _evaluations(subject: Subject) -> Iterator[str]:
    rows = [
        (
            f"{one.step:,}",
            accuracy(one.accuracy),
            interval(one.interval),
            f"{one.num_prompts:,}",
        )
        for one in subject.evaluations
    ]
    if rows:
        yield table(["evaluated at step", "accuracy", INTERVAL, "prompts"], rows)
    sets = [
        (text(one.set), f"{one.step:,}", accuracy(one.accuracy), f"{one.num_prompts:,}")
        for one in subject.sets
    ]
    if sets:
        yield table(["set", "step", "accuracy", "prompts"], sets)


def _samples(shown: Sequence[ShownStep]) -> list[str]:
    if not shown:
        return []
    last = shown[-1]
    parts = [f"**What it says at step {last.step}**, asked:", fenced(last.prompt)]
    if last.images:
        parts.append("with " + ", ".join(code(f"images/{name}.png") for name in last.images))
    for sample in last.samples:
        parts += [f"{sample.word}, reward {figure(sample.reward)}:", fenced(sample.text)]
    return parts


def _recipe(subject: Subject) -> Iterator[str]:
    chosen = [key for key in subject.keys if key.is_set]
    if not chosen:
        return
    rows = [(code(key.name), code(key.value), text(key.origin)) for key in chosen]
    yield _folded(f"{len(chosen)} keys of the recipe are set", table(["key", "value", "by"], rows))


_COMPARED = (
    (REWARD, "Reward"),
    (LOSS, "Loss"),
    ("train/entropy", "Entropy"),
    ("rollout/response_tokens_mean", "Tokens of a response"),
)
"""Curves of two runs as sparklines; the first three that both may have."""


def compare_markdown(compared: RunsCompared) -> str:
    """Return the Markdown file of a comparison."""
    rows = [[text(cell) for cell in row] for row in figure_rows(compared)]
    parts = [
        MARK,
        f"## {text(compared.a_name)} and {text(compared.b_name)}",
        f"**{text(compared.headline)}**",
        *(text(sentence) for sentence in compared.sentences),
        table(["", text(compared.a_name), text(compared.b_name)], rows),
        *_sparks(compared),
        table(
            ["differs", "", text(compared.a_name), text(compared.b_name)],
            [(one.what, code(one.name), code(one.a), code(one.b)) for one in compared.differing],
        )
        if compared.differing
        else ALIKE,
        text(" ".join(compared.notes)),
        f"**{text(compared.a_name)}**: {text(compared.a.verdict.headline)}",
        f"**{text(compared.b_name)}**: {text(compared.b.verdict.headline)}",
        signature(compared.a.made_s),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sparks(compared: RunsCompared) -> Iterator[str]:
    curves = [one for one in _COMPARED if compared.has_rows or one[0] != LOSS]
    rows, both = [], (compared.a, compared.b)
    for name, title in curves[:3]:
        values = [[y for _, y in subject.points(name)] for subject in both]
        flat = [y for one in values for y in one]
        if any(flat):
            low, high = min(flat), max(flat)
            drawn = (sparkline(one, _SPARK, low=low, high=high) for one in values)
            rows.append((title, *(f"`{line}`" if line else "" for line in drawn)))
    if rows:
        names = (text(compared.a_name), text(compared.b_name))
        yield table(["over steps", *names], rows)


def _folded(summary: str, inside: str) -> str:
    """Put text in a collapsed section, where GitHub shows the Markdown."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n\n{inside}\n\n</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: str) -> str:
    return " ".join(cell.split("\n"))


def text(content: str) -> str:
    """Return plain text as Markdown: without markup, entities, mentions and links to issues."""
    plain = _SPECIAL.sub(r"\\\1", " ".join(content.split()))
    return re.sub("[@#]", r"\g<0>&#8203;", plain)  # a backslash alone hides neither from GitHub


def code(content: str) -> str:
    """Return a code span for a table, with any content."""
    content = " ".join(content.split()).replace("|", "\\|")
    ticks = _ticks(content, least=1)
    pad = " " if content.startswith("`") or content.endswith("`") or not content else ""
    return f"{ticks}{pad}{content}{pad}{ticks}"


def fenced(content: str) -> str:
    """Return a block of code, with any content."""
    ticks = _ticks(content, least=3)
    return f"{ticks}text\n{content}\n{ticks}"


def _ticks(content: str, *, least: int) -> str:
    """Return more backticks than occur in a row anywhere in the text."""
    return "`" * max([least, *(1 + len(run) for run in re.findall("`+", content))])
