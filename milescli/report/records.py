"""The parts of a report below what was learned: memory, recipe, plan, versions and machine."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.core.private import without_paths
from milescli.core.units import format_bytes
from milescli.report.formats import NOTHING, size
from milescli.report.frame import Markup, el, joined, table
from milescli.report.subject import ShownKey, Subject

_MOST_MEMORY = 12
_SHORT = 16
"""Letters of a checksum."""


def memory(subject: Subject) -> Markup:
    """Of devices, or of processes; planned beside it."""
    parts: list[Markup | str] = []
    if measured := subject.summary.memory:
        rows = [
            (
                one.worker,
                size(one.used_bytes),
                size(one.peak_bytes),
                size(one.planned_bytes),
                size(one.total_bytes),
            )
            for one in measured[:_MOST_MEMORY]
        ]
        parts.append(table(["who", "used", "at most", "planned", "there is"], rows))
        if (more := len(measured) - _MOST_MEMORY) > 0:
            parts.append(el("p", f"{more} more are not shown.", cls="quiet"))
    processes = subject.memory
    if processes is not None and processes.curve:
        most = max(held for _, held in processes.curve)
        kills = f"; the kernel ended {processes.oom_kills} of them" if processes.oom_kills else ""
        parts.append(
            el("p", f"All processes on the driver's computer: {format_bytes(most)} at most{kills}.")
        )
    return joined([el("h2", "Memory"), *parts]) if parts else Markup("")


def recipe(keys: Sequence[ShownKey]) -> Markup:
    """What was set first; the rest behind a click."""
    if not keys:
        return Markup("")
    name = next((key.value for key in keys if key.name == "name"), "")
    chosen = [key for key in keys if key.is_set]
    default = [key for key in keys if not key.is_set]
    return joined(
        [
            el("h2", "Recipe"),
            el("p", el("strong", name), f": {len(chosen)} of {len(keys)} keys are set."),
            _keys(chosen),
            el("details", el("summary", f"{len(default)} keys have their defaults"), _keys(default))
            if default
            else None,
        ]
    )


def _keys(keys: Sequence[ShownKey]) -> Markup:
    rows = [(key.name, key.value, key.origin) for key in keys]
    return table(["key", "value", "set by"], rows, cls="keys")


def plan(subject: Subject) -> Markup:
    """What was decided, and why."""
    rows = [[*one.values()] for one in subject.decisions()]
    if not rows:
        return Markup("")
    return joined([el("h2", "Plan"), table(["what", "chosen", "because"], rows)])


def surroundings(subject: Subject) -> Markup:
    """Versions, machine, data."""
    manifest = subject.facts.manifest
    if not manifest:
        return Markup("")
    rows = [("machine", subject.machine or NOTHING), *subject.versions().items()]
    rows += [(f"data: {name}", words) for name, words in data_words(subject).items()]
    rows += [(name, str(manifest[name])) for name in ("seed", "created") if name in manifest]
    if fingerprint := manifest.get("plan_fingerprint"):
        rows.append(("plan", str(fingerprint)))
    return joined([el("h2", "Versions and machine"), table([], rows)])


def data_words(subject: Subject) -> dict[str, str]:
    """prompts -> sums.jsonl, 8,192 rows, sha256 b376645265a214f1"""
    described = {}
    for name, one in subject.data().items():
        words = [str(one.get("path", "")).rpartition("/")[2]]
        if isinstance(one.get("num_rows"), int):
            words.append(f"{one['num_rows']:,} rows")
        if one.get("sha256"):
            words.append(f"sha256 {str(one['sha256'])[:_SHORT]}")
        described[name] = ", ".join(word for word in words if word)
    return described


def error(subject: Subject) -> Markup:
    """What ended it, where it failed."""
    failure = subject.history.error
    if not failure:
        return Markup("")
    fixes = failure.get("fix")
    lines = [str(failure.get("error", "")), f"why: {failure.get('why', '')}"]
    lines += [f"fix: {fix}" for fix in fixes] if isinstance(fixes, list) else []
    return joined(
        [el("h2", "What ended it"), el("pre", "\n".join(without_paths(line) for line in lines))]
    )
