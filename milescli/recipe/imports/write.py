"""Implements `miles import`: makes a recipe from a configuration of another framework, with the
line that each value comes from, and reports keys without a counterpart with what they did. Checks
the recipe while making it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError, nearest
from milescli.recipe import layers
from milescli.recipe.algorithms import with_algorithm
from milescli.recipe.imports import openrlhf, prime_rl, roll, slime, trl, verl
from milescli.recipe.imports.reading import ForeignConfig, Setting, read_files, scalar
from milescli.recipe.imports.tables import NOTE, READ, WARNS, Framework, Row, RowResult, load_table
from milescli.recipe.keys import keys
from milescli.recipe.load import build
from milescli.recipe.section import scalar_yaml

LAYOUT = ("parallel.", "machine.", "engines.", "train.max_tokens_per_microbatch", "train.recompute")
LAYOUT += ("train.optimizer.offload",)
"""Keys that fit one machine: the recipe names them in comments, unless they are wanted."""
_ROWS = {
    "data.prompts": "data.train",
    "data.eval": "data.validation",
    "rollout.prompts_per_step": "train.batch_size",
}
"""Keys of RL -> their names in a run on rows."""
_ROW_KEY_PREFIXES = (
    "model.",
    "data.",
    "train.optimizer.",
    "train.lora.",
    "train.steps",
    "train.epochs",
)
_ROW_KEY_PREFIXES += (
    "train.batch_size",
    "train.distill.",
    "train.preference.",
    "train.reward_model.",
    "train.precision",
    "checkpoint.",
    "run.",
    "eval.every",
    *LAYOUT,
)
_PLACEHOLDERS = {"model.path": "MODEL", "data.prompts": "ROWS.jsonl", "data.train": "ROWS.jsonl"}
"""Required key -> the placeholder for its value."""
_UNRESOLVED = re.compile(r"\$\{?\(?\w+|^\{.+\}$")
_REFUSED = "miles refuses, for the reasons at the end:"
_QUOTED = re.compile(r"`([\w.-]+)`")
_NAMED = re.compile(r"[a-z][a-z_]*(?:\.[a-z_0-9]+)+")


@cache
def frameworks() -> dict[str, Framework]:
    """Return the tables by name, in the order in which they are tried."""
    shared = load_table("slime", slime)
    tables = (
        load_table("verl", verl),
        replace(shared, name="miles", fits=slime.fits_miles),
        shared,
        load_table("trl", trl),
        load_table("prime-rl", prime_rl),
        load_table("roll", roll),
        load_table("openrlhf", openrlhf),
    )
    return {table.name: table for table in tables}


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds one key of the recipe."""

    key: str
    value: Any
    comment: str
    """`run.sh:12: data.train_batch_size=1024`"""


@dataclass(slots=True, kw_only=True)
class Imported:
    """Holds a recipe, and what the import reports about it."""

    framework: str
    reason: str
    """How the framework was recognised."""
    entries: dict[str, Entry] = field(default_factory=dict)
    layout: dict[str, Entry] = field(default_factory=dict)
    """Keys that the recipe contains only as comments."""
    without: list[tuple[Setting, str]] = field(default_factory=list)
    """Keys of the framework without a counterpart, and what they did."""
    notes: list[str] = field(default_factory=list)
    text: str = ""
    """The recipe."""


def import_files(
    paths: Sequence[Path],
    *,
    framework: str | None = None,
    overrides: Sequence[str] = (),
    keep_layout: bool = False,
) -> Imported:
    """Make a recipe from `paths`. `framework`: the framework of the configuration; None: recognise
    it. `overrides`: words that follow the script on its command line. Raises RecipeError."""
    found = read_files(paths, overrides=overrides)
    table, reason = _choose_framework(found, framework, paths)
    rows = table.trains_rows(found)
    notes = [*table.notes, *(() if rows else table.rl_notes), *found.warnings]
    made = Imported(framework=table.name, reason=reason, notes=notes)
    if isinstance(rows, str):
        raise RecipeError(
            f"{paths[0].name} cannot become a recipe", why=rows, fix="miles help recipe train"
        )
    found.objective = str(rows.get("train.objective", ""))
    _rename(found, table)
    _map(found, table, made)
    _adapt_to_rows(made, rows, table)
    _fill_required(made, table, is_of_rows=bool(rows))
    _note_unresolved(made)
    if not keep_layout:
        for key in [key for key in made.entries if key.startswith(LAYOUT)]:
            made.layout[key] = made.entries.pop(key)
    name = re.sub(r"[^\w.-]+", "-", paths[-1].stem)
    _check(made, name=name, source=f"{table.name}, {', '.join(path.name for path in paths)}")
    return made


def _choose_framework(
    found: ForeignConfig, framework: str | None, paths: Sequence[Path]
) -> tuple[Framework, str]:
    tables = frameworks()
    if framework is not None:
        if framework not in tables:
            guess = nearest(framework, tables)
            raise RecipeError(
                f"miles reads no configurations of `{framework}`",
                why=f"it reads those of {', '.join(tables)}",
                fix=f"--from {guess or 'verl'}",
            )
        return tables[framework], "--from names it"
    if not found.settings:
        raise RecipeError(
            f"{paths[0].name} sets nothing that miles can read",
            why="it has no training command with arguments, and no keys"
            + "".join(f"; {one}" for one in found.warnings),
            fix="miles import SCRIPT.sh   # the script that starts the training",
        )
    for table in tables.values():
        if reason := table.fits(found):
            return table, reason
    raise RecipeError(
        f"{paths[0].name} is of a framework that miles does not recognise",
        why=f"its first keys are {', '.join(list(found.settings)[:4])}",
        fix=f"--from verl   # or {', '.join(list(tables)[1:])}",
    )


def _rename(found: ForeignConfig, table: Framework) -> None:
    for name in list(found.settings):
        new = table.renamed(name)
        if new != name and new not in found.settings:
            one = found.settings.pop(name)
            found.settings[new] = Setting(new, one.value, f"{one.where} {name}")


def _map(found: ForeignConfig, table: Framework, made: Imported) -> None:
    typed = {name for name, one in found.settings.items() if one.value is not None}
    for name, value in table.defaults_of(found).items():
        if name not in typed:
            found.settings[name] = Setting(name, value, f"{table.name}'s default")
    for key, value in table.of_program(found).items():
        made.entries[key] = Entry(key, value, f"{table.name}: what runs, {found.program}")
    for name, row in table.rows.items():
        if (one := found.settings.get(name)) is None:
            continue
        result = _row_result(row, one, found)
        if isinstance(result, str):
            if name in typed:
                _add_without(made, one, result)
            continue
        if note := result.get(NOTE):
            made.notes.append(str(note))
        for key, value in result.items():
            if key != NOTE and (
                name in typed or key in made.entries or value != keys()[key].default
            ):
                made.entries[key] = Entry(key, value, _location(one))
    for name in (name for name in found.settings if name in typed and name not in table.rows):
        why = table.group_of(name) or f"not known to miles: look it up in {table.name}"
        if why != READ and found.settings[name].value != {}:
            _add_without(made, found.settings[name], why)


def _add_without(made: Imported, one: Setting, why: str) -> None:
    """List a key without a counterpart; a text that begins with WARNS also becomes a note."""
    text = why.removeprefix(WARNS)
    if text != why:
        made.notes.append(f"{one.name} {text}")
    made.without.append((one, text))


def _location(one: Setting) -> str:
    """Return `run.sh:12: data.train_batch_size=1024`."""
    shown = json.dumps(one.value, ensure_ascii=False, default=str)
    return f"{one.where}: {one.name}={shown if len(shown) < 80 else '...'}"


def _row_result(row: Row, one: Setting, found: ForeignConfig) -> RowResult:
    if one.value is None:
        return {}
    try:
        return row(one.value, found)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return (
            "its value, or one that it is read with, is known to a shell alone or has another form"
        )


def _adapt_to_rows(made: Imported, rows: dict[str, Any], table: Framework) -> None:
    """Rename the keys of data, batch and objective for a run without rollout, and drop the other RL
    keys."""
    if not rows:
        return
    for old, new in _ROWS.items():
        if (one := made.entries.pop(old, None)) is not None:
            made.entries[new] = Entry(new, one.value, one.comment)
    made.entries = {k: one for k, one in made.entries.items() if k.startswith(_ROW_KEY_PREFIXES)}
    dropped = ["data.max_prompt_tokens", "data.label_key"]
    if "data.response_key" not in made.entries:  # a column of chats: miles finds it
        dropped.append("data.prompt_key")
    for key in dropped:
        made.entries.pop(key, None)
    for key, value in rows.items():
        made.entries[key] = Entry(key, value, f"{table.name}: what the script trains")


def _fill_required(made: Imported, table: Framework, *, is_of_rows: bool) -> None:
    """Set a placeholder or a default for each required key that is missing, and note it."""
    data = "data.train" if is_of_rows else "data.prompts"
    if not is_of_rows:
        for key, value in table.chosen.items():
            why = f"{table.name} sets no bound of this kind; the value is miles import's choice"
            made.entries.setdefault(key, Entry(key, value, why))
        if "train.steps" not in made.entries:
            steps = keys()["train.steps"].default
            made.notes.append(
                f"train.steps is not in the configuration: without it, the run has {steps} steps"
            )
    for key in ("model.path", data):
        name = _PLACEHOLDERS[key]
        if key not in made.entries:
            made.entries[key] = Entry(key, name, "not in the configuration")
            made.notes.append(f"{key} is not in the configuration: write it in place of {name}")


def _note_unresolved(made: Imported) -> None:
    for one in list(made.entries.values()):
        if isinstance(one.value, str) and _UNRESOLVED.search(one.value):
            if one.key.startswith("run."):  # a name that nothing depends on
                made.entries.pop(one.key)
                made.without.append((_foreign_setting(one), "is known to a run alone"))
                continue
            made.notes.append(f"{one.key} is {one.value}, which only a run knows: write its value")


def _check(made: Imported, *, name: str, source: str) -> None:
    """Write the text and load it as a recipe; move each refused key to the keys without a
    counterpart. Raises RecipeError for an error that no imported key causes."""
    for _ in range(len(made.entries) + 1):
        made.text = "\n".join(_lines(made, name=name, source=source)) + "\n"
        try:
            table = layers.from_yaml(
                made.text, source="the recipe", layer=layers.SettingsLayer.RECIPE
            )
            build(with_algorithm(table), source=name)
            return
        except RecipeError as error:
            named = _NAMED.findall(f"{error.what} {error.why} {' '.join(error.fixes)}")
            ours = [key for key in named if key in made.entries and key != "train.objective"]
            changed = (key for key in ours if made.entries[key].value != keys()[key].default)
            wrong = next(changed, ours[0] if ours else None)
            if wrong is None:  # it may name the value instead: `reward_model` needs a model
                words = set(_QUOTED.findall(error.what))
                wrong = next(
                    (k for k, one in made.entries.items() if str(one.value) in words), None
                )
            if wrong is None:
                raise
            one = made.entries.pop(wrong)
            if (place := _PLACEHOLDERS.get(wrong)) is not None and one.value != place:
                made.entries[wrong] = Entry(wrong, place, "theirs is refused: see the end")
            why = f"{error.what}: {error.why}"
            made.without.append((_foreign_setting(one), f"{wrong}={one.value} is refused: {why}"))
            refused_note = next((note for note in made.notes if note.startswith(_REFUSED)), None)
            if refused_note is not None:
                made.notes.remove(refused_note)
            made.notes.append(
                f"{refused_note or _REFUSED}{',' * (refused_note is not None)} {wrong}"
            )


def _foreign_setting(entry: Entry) -> Setting:
    """Return the framework's key from which an entry was made."""
    where, _, rest = entry.comment.partition(": ")
    key, _, value = rest.partition("=")
    return Setting(key, scalar(value), where)


def _lines(made: Imported, *, name: str, source: str) -> Iterator[str]:
    yield f"# Imported from {source}."
    for note in made.notes:
        yield f"# Note: {' '.join(note.split())}"
    yield ""
    yield f"name: {scalar_yaml(name)}"
    yield from _sections({key: made.entries[key] for key in keys() if key in made.entries})
    if made.layout:
        yield ""
        yield "# The layout, which miles plans for the machine that it finds. To keep theirs:"
        for key in (key for key in keys() if key in made.layout):
            one = made.layout[key]
            yield f"#   --set {key}={scalar_yaml(one.value)}   # {one.comment}"
    if made.without:
        yield ""
        yield "# Without a counterpart:"
        reasons = dict[str, list[Setting]]()
        for one, why in made.without:
            reasons.setdefault(" ".join(why.split()), []).append(one)
        for why, settings in reasons.items():
            yield f"#   {why}:"
            yield from (f"#     {_location(one)}" for one in settings)


def _sections(entries: dict[str, Entry]) -> Iterator[str]:
    open_sections: list[str] = []
    for key, one in entries.items():
        *parents, last = key.split(".")
        common = 0
        while common < len(parents) and open_sections[: common + 1] == parents[: common + 1]:
            common += 1
        for depth in range(common, len(parents)):
            if depth == 0:
                yield ""
            yield f"{'  ' * depth}{parents[depth]}:"
        open_sections = parents
        yield f"{'  ' * len(parents)}{last}: {scalar_yaml(one.value)}  # {one.comment}"
