"""The tables of other frameworks (templates/imports/NAME.yaml): what each key of theirs is here.

`rows`: their key -> rule, in the order in which they count. A rule is one of

    train.clip_low train.clip_high     these keys of ours, with their value
    train.kl_coef train.kl_in=loss     the same, and a constant
    set KEY=VALUE                      constants, if their value is true
    switch KEY=A|B                     A if their value is true, else B
    positive RULE                      nothing unless their value is above 0
    whole KEY                          nothing unless their value is a whole number
    every KEY                          an interval; below 1 it is never, 0
    pair KEY KEY                       the two numbers of a list
    list KEY                           a list of names
    top_k KEY                          a number, of which 0 or less is -1
    file KEY, model KEY                data or a model: a path or a name on the hub
    choose NAME: what it chooses       by the table NAME of `choices`
    call NAME                          a function of the framework's module, or of this one
    share TOTAL KEY                    a share of the number TOTAL of theirs, if that is known
    if NAME: RULE                      if that function, or that key of theirs, is true; else
                                       `conditions` says why not
    with KEY                           nothing: it is read with that key
    no TEXT                            no counterpart; the text says what it does there
    warn TEXT                          the same, and a note at the head of the recipe

A row may also return a note, as the key NOTE. `kinds`: the name of a function or a key of theirs ->
the `defaults` that differ if it is true. `groups`: a text -> the beginnings of keys that have no
row; the longest beginning counts. Texts in capitals are those of TEXTS; READ: another key reads
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import ModuleType
from typing import Any

from milescli.core.files import parse_yaml
from milescli.recipe.imports.reading import ForeignConfig, scalar
from milescli.recipe.templates import templates_dir

RowResult = dict[str, Any] | str
"""Keys of a recipe with their values; or, as a text, why there are none. Empty: the key is read
together with another one."""
Row = Callable[[Any, ForeignConfig], RowResult]

NOTE = "note"
"""Key of a row's result that is a note at the head of the recipe."""
READ, WARNS = "READ", "!"
"""READ: text of a group whose keys are read with another. WARNS: beginning of a text that is also a
note."""
TEXTS = {
    "WARM_UP": "is the share of all steps in which the learning rate rises, and their number is "
    "not in the configuration: set train.optimizer.warmup_steps",
    "EPOCHS": "counts passes over the data; miles counts steps of RL: set train.steps to epochs x "
    "rows / rollout.prompts_per_step",
    "PLACES": "places or batches a model on devices: miles plans that",
    "LOGS": "configures logs: see run.trackers and run.project",
    "ENGINE": "an option of the engine: miles plans the engines; engines.extra passes options to "
    "SGLang",
    "OWN_CODE": "code of its own: write it as a plug-in (docs/extending.md)",
    "SHAPE": "the shape of the model: miles reads it from the model's config.json",
    "SAVES": "names a folder for results: see run.dir and run.name",
    "KERNELS": "chooses kernels or formats of the computation: miles chooses them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Holds the table of one framework."""

    name: str
    fits: Callable[[ForeignConfig], str]
    """Returns how a configuration was recognised as this framework's; empty if it was not."""
    trains_rows: Callable[[ForeignConfig], RowResult]
    """Returns the recipe keys of a run without rollout; empty for RL."""
    of_program: Callable[[ForeignConfig], dict[str, Any]]
    """Returns the keys that the program itself decides, whatever its settings."""
    rows: Mapping[str, Row]
    """Their key -> row; a later row overrides the keys of an earlier one."""
    groups: Mapping[str, str]
    """Prefix of keys that have no row -> what all these keys do."""
    defaults: Mapping[str, Any]
    """The framework's defaults that differ from those of a recipe."""
    kinds: Sequence[tuple[Callable[[ForeignConfig], object], Mapping[str, Any]]] = ()
    """Tests, each with the defaults that differ where the test is true."""
    aliases: Mapping[str, str]
    """Another name of a key -> the name that has the row. A name that ends with a dot renames a
    section."""
    notes: tuple[str, ...]
    """Notes that hold for every configuration of this framework."""
    rl_notes: tuple[str, ...]
    """Notes that hold for every RL configuration of this framework."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys that RL requires and the framework has no counterpart for -> miles import's
    choice."""

    def renamed(self, name: str) -> str:
        """Return the name under which a key has its row."""
        for old, new in self.aliases.items():
            if name == old or (old.endswith(".") and name.startswith(old)):
                return new + name[len(old) :]
        return name

    def defaults_of(self, found: ForeignConfig) -> dict[str, Any]:
        """Return the defaults for what the configuration trains; null: the key has no default."""
        made = dict(self.defaults)
        for test, values in self.kinds:
            if test(found):
                made |= values
        return {name: value for name, value in made.items() if value is not None}

    def group_of(self, name: str) -> str:
        """Return what a key without a row does; empty if unknown."""
        begins = [one for one in self.groups if _begins(name, one)]
        return self.groups[max(begins, key=len)] if begins else ""


def _begins(name: str, begin: str) -> bool:
    return name == begin or name.startswith(begin if begin.endswith(("_", ".")) else f"{begin}.")


def load_table(name: str, module: ModuleType) -> Framework:
    """Load templates/imports/NAME.yaml. `module`: defines its `fits`, `trains_rows` and the
    functions that rules name."""
    text = (templates_dir() / "imports" / f"{name}.yaml").read_text(encoding="utf-8")
    table = parse_yaml(text)
    rules = _Rules(module, table.get("choices", {}), table.get("conditions", {}))
    return Framework(
        name=name,
        fits=module.fits,
        trains_rows=module.trains_rows,
        of_program=getattr(module, "of_program", lambda found: {}),
        rows={key: rules.row(rule) for key, rule in table["rows"].items()},
        groups={
            begin: _text(why) for why, begins in table["groups"].items() for begin in begins.split()
        },
        defaults={key: scalar(value) for key, value in table["defaults"].items()},
        kinds=[
            (rules.test(name), {key: scalar(value) for key, value in values.items()})
            for name, values in table.get("kinds", {}).items()
        ],
        aliases=table.get("aliases", {}),
        notes=tuple(table.get("notes", ())),
        rl_notes=tuple(table.get("rl_notes", ())),
        chosen=table.get("chosen", {}),
    )


def _text(text: str) -> str:
    return TEXTS.get(text, text)


@dataclass(frozen=True, slots=True)
class _Rules:
    """Makes rows from rules."""

    module: ModuleType
    choices: Mapping[str, Mapping[Any, RowResult]]
    conditions: Mapping[str, str]

    def test(self, name: str) -> Callable[[ForeignConfig], object]:
        """Return the function with that name, or a function that returns the value of the
        framework's key."""
        return getattr(self.module, name, lambda found: found.value(name))

    def row(self, rule: str) -> Row:
        """Return the row of a rule. Raises LookupError if the rule names an unknown function."""
        word, _, rest = rule.partition(" ")
        if word == "if":
            name, _, inner = rest.partition(": ")
            row, why, test = self.row(inner), self.conditions[name], self.test(name)
            return lambda value, found: row(value, found) if test(found) else why
        if word == "positive":
            row = self.row(rest)
            return lambda value, found: row(value, found) if _is_positive(value) else {}
        if word == "call":
            return getattr(self.module, rest, None) or globals()[rest]
        if word == "choose":
            name, _, what = rest.partition(": ")
            return _choice_row(self.choices[name], what=what)
        if word == "with":
            return lambda value, found: {}
        if word in ("no", "warn"):
            return lambda value, found: (WARNS if word == "warn" else "") + _text(rest)
        if word == "share":
            total, _, key = rest.partition(" ")
            return lambda value, found: share(value, found.value(total), key)
        if word in _VALUE_RULES:
            key, _, constant = rest.partition("=")
            make = _VALUE_RULES[word]
            return lambda value, found: make(value, key.split(), constant)
        constants = [pair.partition("=") for pair in rule.split()]
        return lambda value, found: {
            key: scalar(constant) if equals else value for key, equals, constant in constants
        }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


_VALUE_RULES: dict[str, Callable[[Any, list[str], str], RowResult]] = {
    "set": lambda value, keys, constant: {keys[0]: scalar(constant)} if value else {},
    "switch": lambda value, keys, constant: {keys[0]: constant.split("|")[0 if value else 1]},
    "whole": lambda value, keys, constant: {keys[0]: int(value)} if isinstance(value, int) else {},
    "every": lambda value, keys, constant: {
        keys[0]: value if isinstance(value, int) and value > 0 else 0
    },
    "pair": lambda value, keys, constant: {keys[0]: value[0], keys[1]: value[1]},
    "list": lambda value, keys, constant: {keys[0]: names_of(value)},
    "top_k": lambda value, keys, constant: {keys[0]: value if value > 0 else -1},
    "file": lambda value, keys, constant: {keys[0]: data_name(value)},
    "model": lambda value, keys, constant: {keys[0]: path_of(str(value))},
}


def _choice_row(choices: Mapping[Any, RowResult], *, what: str) -> Row:
    def row(value: Any, found: ForeignConfig) -> RowResult:
        known = value
        if isinstance(value, str):
            known = value.lower().replace("-", "_").rpartition(".")[2]
        return choices.get(known, f"{WARNS}{what} `{value}`, which miles does not have")

    return row


_MLP = ("gate_proj", "up_proj", "down_proj")
_MEGATRON_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": _MLP[:2],
    "linear_fc2": _MLP[2:],
    "experts": _MLP,
}
"""Megatron's module name -> the names in a model folder."""
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w./-]+)*")


def data_name(value: Any) -> Any:
    """Return the recipe's name for data: files as they are, with `[0:10]` for `@[0:10]`; names on
    the hub with `hf:`."""
    if isinstance(value, list):
        names = [data_name(one) for one in value]
        return names[0] if len(names) == 1 else names
    text = path_of(str(value)).replace("@[", "[")
    bare = text.partition("[")[0]
    is_file = PurePath(bare).suffix in _SUFFIXES or bare.startswith((".", "/", "~", "$"))
    return f"hf:{text}" if not is_file and _HUB.fullmatch(text) else text


def path_of(text: str) -> str:
    """Return a path with `~` in place of `$HOME`, and without a leading `$PWD/`."""
    text = re.sub(r"^\$(PWD|\{PWD\}|\(pwd\))/", "", text)
    return re.sub(r"^\$(HOME\b|\{HOME\})", "~", text)


def share(value: float, total: Any, key: str) -> RowResult:
    """Return the key as a share of the steps, if their number is known."""
    if value <= 0:
        return {}
    is_known = isinstance(total, int | float) and total > 0
    return {key: round(value * total)} if is_known else TEXTS["WARM_UP"]


def ratio(whole: float, part: float) -> int | str:
    """Return how many times `part` goes into `whole`, or the reason if it does not divide it."""
    if part > 0 and whole % part == 0:
        return int(whole // part)
    return f"{whole:g} does not divide by {part:g}"


def updates(whole: float, part: float) -> RowResult:
    """Return the updates per step: `whole` samples or prompts a step, `part` an update."""
    number = ratio(whole, part)
    return number if isinstance(number, str) else {"train.updates_per_step": max(1, number)}


def names_of(value: Any) -> list[str]:
    """Return the modules for train.lora.targets, Megatron's by their names in a model folder."""
    words = value if isinstance(value, list) else str(value).split(",")
    names = [str(one).strip(" ,").rpartition(".")[2] for one in words]
    names = [one.replace("all_linear", "all-linear") for one in names if one]
    made = [part for one in names for part in _MEGATRON_MODULES.get(one, (one,))]
    return list(dict.fromkeys(made))


def trackers(value: Any, found: ForeignConfig) -> RowResult:
    """Map the trackers that the framework logs to."""
    named = value if isinstance(value, list) else [value]
    known = [one for one in ("tensorboard", "wandb", "mlflow", "trackio") if one in named]
    return {"run.trackers": known} if known else {}


def recompute(value: Any, found: ForeignConfig) -> RowResult:
    """Map the activation recomputation of the backward pass."""
    return {"train.recompute": "full"} if value == "full" else TEXTS["KERNELS"]
