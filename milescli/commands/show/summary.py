"""Shows results of runs, evaluations and exports on the screen and as JSON. Units come from the
field names (`_s`, `_bytes`, accuracy)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path

from milescli.console.columns import percent
from milescli.console.output import Output
from milescli.core.units import format_bytes, format_duration
from milescli.recipe.store_url import is_store_url

MAX_SHOWN_CHARS = 6
"""Number of processes or devices whose memory is shown."""


def show_run_summary(summary: object, *, output: Output) -> None:
    """Show how a run ended, where it is, and the next commands."""
    fields = _fields(summary)
    output.json("run_summary", fields)
    run = shlex.quote(str(fields["path"]))
    adapters = fields.pop("adapters", {})
    memory = memory_words(fields.pop("memory", []))
    output.kv(readable(fields) | ({"memory": memory} if memory else {}), title="reached")
    if adapters:
        _show_adapters(adapters, run=run, steps=int(str(fields["steps"])), output=output)
        return
    evaluated = fields.get("accuracy_after") is not None
    output.next_steps(
        {
            **({f"miles eval {run}": "evaluate it again"} if evaluated else {}),
            f"miles resume {run} --steps {2 * int(str(fields['steps']))}": "train it further",
            f"miles export {run} --to "
            f"{shlex.quote(Path(str(fields['path'])).name + '-hf')}": "write a Hugging Face folder",
        }
    )


def memory_words(memory: object) -> str:
    """Format memory, the largest first: `9.1 GiB at most (9.6 planned): trainer-rank-0 6.0 GiB (6.2
    GiB), ...`. `memory` is a field of `RunSummary`; without measurements, the text is empty."""
    assert isinstance(memory, list), "a field of RunSummary"
    each = [
        f"{one['worker']} {format_bytes(one['peak_bytes'])}"
        + (f" ({format_bytes(one['planned_bytes'])})" if one["planned_bytes"] else "")
        for one in memory[:MAX_SHOWN_CHARS]
    ]
    more = len(memory) - MAX_SHOWN_CHARS
    planned = " (planned)" if any(one["planned_bytes"] for one in memory) else ""
    return f"at most{planned}: " + ", ".join(each) + f", {more} more" * (more > 0) if each else ""


def _show_adapters(
    adapters: Mapping[str, Mapping[str, object]], *, run: str, steps: int, output: Output
) -> None:
    """Show what each adapter reached, and the next commands."""
    for name, reached in adapters.items():
        output.kv(readable(dict(reached)), title=name)
    name, reached = next(iter(adapters.items()))
    output.next_steps(
        {
            f"miles export {shlex.quote(str(reached['path']))} --to {shlex.quote(name)}": "write "
            "one of them as a PEFT folder",
            f"miles resume {run} --steps {2 * steps}": "train them further",
        }
    )


def show_export(summary: object, *, to: str, output: Output) -> None:
    """Show what was written, and how to load it."""
    fields = _fields(summary)
    output.json("export", fields)
    output.kv(readable(fields), title="exported")
    is_served = not any("does not serve it" in note for note in getattr(summary, "notes", []))
    if is_served and not is_store_url(to):
        folder = shlex.quote(str(Path(to).expanduser()))  # a quoted ~ is no home
        is_adapter = fields.get("format") == "adapter"
        what = f"BASE --lora-paths policy={folder}" if is_adapter else folder
        output.next_steps({f"python -m sglang.launch_server --model-path {what}": "serve it"})


def readable(fields: dict[str, object]) -> dict[str, object]:
    """Return names without units, and values with them; omits None and empty lists."""
    pairs = {}
    for name, value in fields.items():
        if value is not None and value != [] and value != {}:
            pairs[_label(name)] = _value(name, value)
    return pairs


def _label(name: str) -> str:
    for unit in ("_bytes", "_s"):
        name = name.removesuffix(unit)
    return name.removeprefix("num_").replace("_", " ")


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_s") or name == "seconds":
            return format_duration(value)
        if name.endswith("_bytes"):
            return format_bytes(value)
        if "accuracy" in name or "fraction" in name:
            return percent(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


def _fields(summary: object) -> dict[str, object]:
    assert is_dataclass(summary) and not isinstance(summary, type), (
        f"a result is a dataclass, not {summary!r}"
    )
    return asdict(summary)
