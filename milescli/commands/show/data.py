"""Shows what `miles data check` found, as pages or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from milescli.console.output import Mode, Output
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.data.examples import ExampleReport
    from milescli.data.prompt_source import SourceReport
    from milescli.runtime.inputs.data_check import DataCheck, Part
    from milescli.runtime.inputs.file_reports import FileReport

BAR_WIDTH = 40
MAX_ROWS = 20
"""Number of bad rows that are shown."""
MAX_PIECES = 600
"""Number of tokens of a prompt that are shown."""


def show_data(check: DataCheck, *, output: Output) -> None:
    """Show the data part by part, then what a run would warn about. The command raises the
    problems, with the first in full."""
    if output.mode is Mode.JSON:
        output.json("data", as_payload(check))
        return
    for part in check.parts:
        for named, look in zip(part.named, part.files, strict=False):
            _show_file(f"{part.name}: {named}", look, output=output)
        _show_images(part, output=output)
        _show_lengths(part, output=output)
        _show_prompts(part, output=output)
    for warning in check.warnings:
        output.warn(warning)
    for problem in check.problems[1:]:
        output.error(problem)
    if not check.problems:
        output.success("a run would accept it")


def as_payload(check: DataCheck) -> dict[str, object]:
    """Return the check as JSON fields."""
    return {
        "usable": not check.problems,
        "parts": [_part_payload(part) for part in check.parts],
        "problems": [problem.as_dict() for problem in check.problems],
        "warnings": check.warnings,
        "checked": [made.as_dict() for made in check.checked],
    }


def _part_payload(part: Part) -> dict[str, object]:
    from milescli.runtime.inputs.data_check import histogram

    unit, lengths = _lengths(part)
    return {
        "name": part.name,
        "files": [
            {
                "named": named,
                **{name: value for name, value in asdict(look).items() if name in _FILE_FIELDS},
                "bad": [{"line": row.line, "reason": row.reason} for row in look.bad],
                "duplicates": [
                    {"line": again, "first_line": first} for again, first in look.duplicates
                ],
            }
            for named, look in zip(part.named, part.files, strict=False)
        ],
        "report": asdict(report) if (report := _report(part)) else None,
        "images": asdict(part.images) if part.images else None,
        "length_unit": unit,
        "lengths": [
            {"from": low, "to": high, "rows": count}
            for low, high, count in (histogram(lengths) if lengths else [])
        ],
        "dropped_rows": part.loaded.long_rows if part.loaded else [],
        "rendered": [asdict(shown) for shown in part.rendered],
    }


_FILE_FIELDS = (
    *("path", "columns", "layout", "reads", "prompt_key", "label_key", "learned"),
    *("num_rows", "num_bad", "num_duplicates"),
)


def _report(part: Part) -> SourceReport | ExampleReport | None:
    return part.loaded.report if part.loaded else part.report


def _lengths(part: Part) -> tuple[str, list[int]]:
    if part.examples:
        return "tokens", sorted(row.num_tokens for row in part.examples)
    if part.loaded is not None:
        return "tokens", part.loaded.lengths
    return "characters", sorted(length for look in part.files for length in look.lengths)


def _show_file(title: str, report: FileReport, *, output: Output) -> None:
    whole = "row" if report.learned else "prompt"
    fields = {
        "columns": ", ".join(report.columns) or "none",
        "layout": report.layout or "none of the known ones; columns are found by name",
    }
    if report.problem is not None and not report.num_rows:
        output.kv(fields, title=title)
        output.blank()
        return
    output.kv(
        {
            **fields,
            **({"learned": report.learned} if report.learned else {}),
            "prompt": report.prompt_key,
            "label": report.label_key,
            **({"also read": beside} if (beside := _other_columns(report)) else {}),
            **({"not read": ", ".join(left)} if (left := _unread_columns(report)) else {}),
            "rows": f"{report.num_rows:,}",
            "bad rows": f"{report.num_bad:,}",
            f"repeated {whole}s": f"{report.num_duplicates:,}",
        },
        title=title,
    )
    bad_rows = [f"{report.unit} {row.line}: {row.reason}" for row in report.bad[:MAX_ROWS]]
    bad_rows += [
        f"{report.unit} {again}: the {whole} repeats that of {report.unit} {first}"
        for again, first in report.duplicates
    ]
    for line in bad_rows:
        output.text(f"  {line}")
    if report.num_bad > MAX_ROWS:
        output.note(f"  and {report.num_bad - MAX_ROWS:,} more bad rows")
    output.blank()


def _other_columns(report: FileReport) -> str:
    """Return the columns that are read besides the prompt, the label and the learned ones."""
    named = (report.prompt_key, report.label_key, *(report.learned or "").split(", "))
    return ", ".join(
        f"{column} ({role})" for column, role in report.reads.items() if column not in named
    )


def _unread_columns(report: FileReport) -> list[str]:
    """Return the columns that are not read; none if that is not known."""
    read = {name.partition(".")[0] for name in report.reads}
    return [name for name in report.columns if name not in read] if read else []


def _show_images(part: Part, *, output: Output) -> None:
    if (images := part.images) is None:
        return
    several = (
        "" if images.num_different == images.num_images else f", {images.num_different:,} different"
    )
    small, large = ("{} x {}".format(*size) for size in (images.smallest, images.largest))
    each = f"{images.tokens_min}"
    if images.tokens_min != images.tokens_max:
        each += f" to {images.tokens_max:,}"
    output.kv(
        {
            "images": f"{images.num_images:,} in {images.num_rows:,} rows{several}",
            "pixels": small if small == large else f"{small} to {large}",
            "tokens": f"{images.tokens:,} of all, {each} of one",
            "in memory": format_bytes(images.size_bytes),
        },
        title="images as the model sees them",
    )
    output.blank()


def _show_lengths(part: Part, *, output: Output) -> None:
    from milescli.runtime.inputs.data_check import histogram

    unit, lengths = _lengths(part)
    if not lengths:
        return
    ranges = histogram(lengths)
    most = max(count for _, _, count in ranges)
    output.table(
        [unit, "sequences" if part.examples else "prompts", ""],
        [
            (f"{low} to {high}", count, "█" * -(-count * BAR_WIDTH // most))
            for low, high, count in ranges
        ],
    )
    if part.loaded is not None and (report := part.loaded.report).num_dropped:
        rows = ", ".join(part.loaded.long_rows[:5])
        bound = part.data.max_prompt_tokens
        output.note(
            f"{report.num_dropped:,} of {report.num_measured:,} prompts are longer than {bound} "
            f"tokens and are skipped: {rows}" + (", ..." if report.num_dropped > 5 else "")
        )
    if part.report is not None:
        shares = f"{part.report.loss_tokens:,} of {part.report.tokens:,} tokens are learned"
        output.note("; ".join(filter(None, (shares, part.report.note))))
    output.blank()


def _show_prompts(part: Part, *, output: Output) -> None:
    for shown in part.rendered[:2]:
        side = f", {shown.side}" * bool(shown.side)
        output.note(f"{shown.place} ({part.name}{side}), as the model sees it")
        pieces = zip(shown.tokens, map(bool, shown.loss_mask), strict=True)
        output.masked(list(pieces)[:MAX_PIECES])
        output.blank()
