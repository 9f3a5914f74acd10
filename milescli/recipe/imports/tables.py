"""How the tables of other frameworks are written: a row says what a key of theirs is here, or what
it does there where nothing here corresponds to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from milescli.recipe.imports.reading import Foreign

Said = dict[str, Any] | str
"""Keys of a recipe with their values; or, as a text, why there are none. Empty: another key of
theirs is read together with it."""
Row = Callable[[Any, Foreign], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The table of one framework."""

    name: str
    fits: Callable[[Foreign], str]
    """Returns by what its configuration is known; empty if it is another's."""
    rows: Mapping[str, Row]
    """Their key -> row; a later row overrides the keys of an earlier one."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Beginning of keys that have no row -> what all of them do."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults, where a recipe may have others."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Older name of a key -> its row."""
    trains_rows: Callable[[Foreign], Said] = lambda found: {}
    """Keys of a run without rollout; empty for RL."""
    notes: tuple[str, ...] = ()
    """What holds for every configuration of it."""


def to(*keys: str) -> Row:
    """Return a row with the same value under other names."""
    return lambda value, found: dict.fromkeys(keys, value)


def gone(why: str) -> Row:
    """Return a row without a counterpart. `why`: what the key does there."""
    return lambda value, found: why


def used_by(key: str) -> Row:
    """Return a row of a key that is read together with `key`."""
    return lambda value, found: {}


def choose(choices: Mapping[Any, Said], *, what: str) -> Row:
    """Return a row that maps values, of which texts are compared in small letters. `what`: what the
    key chooses, for a value without a counterpart."""

    def row(value: Any, found: Foreign) -> Said:
        known = value.lower().replace("-", "_") if isinstance(value, str) else value
        return choices.get(known, f"{what} `{value}`, which miles does not have")

    return row


def same(values: Iterable[Any], said: Said) -> dict[Any, Said]:
    """Return choices of which all mean the same."""
    return dict.fromkeys(values, said)


def when(test: Callable[[Foreign], bool], row: Row, *, otherwise: str) -> Row:
    """Return a row that counts only if `test` holds; `otherwise` says why it does not."""
    return lambda value, found: row(value, found) if test(found) else otherwise


def every(key: str) -> Row:
    """Return a row of an interval in steps, of which theirs below 1 mean never."""
    return lambda value, found: {key: value if isinstance(value, int) and value > 0 else 0}


def optional(row: Row) -> Row:
    """Return a row of a number of which theirs of 0 or less mean none."""
    return lambda value, found: (
        row(value, found) if isinstance(value, int | float) and value > 0 else {}
    )


def file(key: str) -> Row:
    """Return a row of a data file, several, or a data set of the hub."""
    return lambda value, found: {key: data_name(value)}


_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w./-]+)*")


def data_name(value: Any) -> Any:
    """Return what names data here: files as they are, with `[0:10]` for `@[0:10]`; names on the hub
    with `hf:`."""
    if isinstance(value, list):
        names = [data_name(one) for one in value]
        return names[0] if len(names) == 1 else names
    text = path_of(str(value)).replace("@[", "[")
    bare = text.partition("[")[0]
    is_file = PurePath(bare).suffix in _SUFFIXES or bare.startswith((".", "/", "~", "$"))
    return f"hf:{text}" if not is_file and _HUB.fullmatch(text) else text


def path_of(text: str) -> str:
    """Return a path with `~` for the home folder, which the shell calls HOME."""
    return re.sub(r"^\$(HOME\b|\{HOME\})", "~", text)


def model(key: str) -> Row:
    """Return a row of a model: a folder or a name on the hub."""
    return lambda value, found: {key: path_of(str(value))}


def ratio(whole: float, part: float) -> int | str:
    """Return how often `part` goes into `whole`; a reason where it does not."""
    if part > 0 and whole % part == 0:
        return int(whole // part)
    return f"{whole:g} does not divide by {part:g}"


def updates(whole: float, part: float) -> Said:
    """Return the optimizer updates of a step of `whole` samples or prompts, `part` an update."""
    number = ratio(whole, part)
    return number if isinstance(number, str) else {"train.updates_per_step": max(1, number)}


EPOCHS = (
    "counts passes over the data; miles counts steps of RL: set train.steps to epochs x rows / "
)
EPOCHS += "rollout.prompts_per_step"
PLACES = "places or batches a model on devices: miles plans that"
LOGS = "configures logs: see run.trackers and run.project"
ENGINE = "an option of the engine: miles plans the engines; engines.extra passes options to SGLang"
OWN_CODE = "code of its own: write it as a plug-in (docs/extending.md)"
SHAPE = "the shape of the model: miles reads it from the model's config.json"
SAVES = "names a folder for results: see run.dir and run.name"
KERNELS = "chooses kernels or formats of the computation: miles chooses them"


def scale_lora(value: Any) -> list[str]:
    """Return modules for train.lora.targets."""
    if isinstance(value, list):
        return [str(one) for one in value]
    names = [one.strip() for one in str(value).replace("all_linear", "all-linear").split(",")]
    return [one for one in names if one]


def trackers(value: Any, found: Foreign) -> Said:
    """A row of the places that they log to."""
    named = value if isinstance(value, list) else [value]
    known = [one for one in ("tensorboard", "wandb", "mlflow", "trackio") if one in named]
    return {"run.trackers": known} if known else {}
