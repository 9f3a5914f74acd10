"""Reads the layers of a recipe, lowest first: recipe, user files, environment, `--set` and flags.

Each layer becomes a table key -> KeyValue.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from milescli.core.errors import RecipeError
from milescli.core.files import read_regular_text
from milescli.recipe import reader
from milescli.recipe.keys import SETTINGS, RecipeKey, keys, nearest_key, sections
from milescli.recipe.reader import NULL_TEXTS, YamlNode, typed_value


class SettingsLayer(StrEnum):
    """Names the layers that a value can come from, weakest first."""

    DEFAULT = "default"
    ALGORITHM = "algorithm"
    RECIPE = "recipe"
    FILE = "file"
    ENV = "env"
    SET = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Says which layer and place set a value."""

    layer: SettingsLayer
    where: str = ""
    """`quickstart.yaml:12`, `gspo`, `MILES_RUN__NAME`, `--set train.steps=3`; empty for a
    default."""

    def __str__(self) -> str:
        return (
            self.where if self.layer is SettingsLayer.SET else f"{self.layer} {self.where}".strip()
        )

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Parse the output of `str`."""
        if text.startswith("--"):
            return cls(layer=SettingsLayer.SET, where=text)
        layer, _, where = text.partition(" ")
        return cls(layer=SettingsLayer(layer), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """Holds the value of one key in one layer."""

    value: object
    """A YAML value; None or {} if the key is an optional section."""
    text: str
    """The value as the user wrote it."""
    origin: Origin
    comment: str = ""


Table = dict[str, KeyValue]


TENSORBOARD, WANDB = "run.tensorboard", "run.wandb_project"
TRACKERS, PROJECT = "run.trackers", "run.project"
OLD_KEYS: Mapping[str, RecipeKey] = {
    TENSORBOARD: RecipeKey(
        name=TENSORBOARD,
        wants="true or false",
        default=True,
        doc="",
        is_text=False,
        is_list=False,
        optional=False,
    ),
    WANDB: RecipeKey(
        name=WANDB, wants="text", default=None, doc="", is_text=True, is_list=False, optional=True
    ),
}
"""Former keys, which are still read but never written."""


@cache
def readable_keys() -> Mapping[str, RecipeKey]:
    """Return every key that a layer may set."""
    return {**keys(), **OLD_KEYS}


def with_new_names(table: Table) -> Table:
    """Return the layer with new names in place of old ones. Raises RecipeError if it has both, or a
    value that the old key never accepted."""
    old = {name: table[name] for name in OLD_KEYS if name in table}
    if not old:
        return table
    first = next(iter(old.values()))
    shown = old[TENSORBOARD].value if TENSORBOARD in old else True
    project = old[WANDB].value if WANDB in old else None
    if not isinstance(shown, bool):
        raise RecipeError(
            f"`{TENSORBOARD}` cannot be `{old[TENSORBOARD].text}`",
            why=f"{first.origin}: this key was true or false before `{TRACKERS}` replaced it",
            fix=[f"--set '{TRACKERS}=[tensorboard]'", f"--set '{TRACKERS}=[]'"],
        )
    new: dict[str, object] = {TRACKERS: ["tensorboard"] * shown + ["wandb"] * (project is not None)}
    if project is not None:
        new[PROJECT] = project
    made: Table = {name: entry for name, entry in table.items() if name not in old}
    for key, value in new.items():
        if key in made:
            raise RecipeError(
                f"`{next(iter(old))}` and `{key}` are both set",
                why=f"{first.origin} uses the old name, {made[key].origin} the new one",
                fix=f"remove {' and '.join(f'`{name}`' for name in old)}, and keep `{key}`",
            )
        made[key] = replace(first, value=value, text=str(value))
    return made


ENV_PREFIX = "MILES_"
RAY_VARIABLE = "RAY_ADDRESS"
ALGORITHM_KEY = "train.algorithm"


def from_yaml(text: str, *, source: str, layer: SettingsLayer, only: tuple[str, ...] = ()) -> Table:
    """Read a recipe or a user file. `only` limits the sections, for files that may not hold
    hyperparameters."""
    root = reader.read(text, source=source)
    if not isinstance(root.value, dict):
        raise RecipeError(
            f"{source} is not a recipe",
            why=f"a recipe must be a mapping of keys; this is `{_short(root.text)}`",
            fix=f"miles recipes show quickstart > {source}   # an example to start from",
        )
    table: Table = {}
    for name, node in root.value.items():
        where = f"{source}:{node.line}"
        _refuse_dotted(name, node, where=where)
        if only and name not in only and (name in sections() or name in keys()):
            raise _hyperparameter(name, where=where, remedy=f"take `{name}` out of {source}")
        _flatten(node, name, table, source=source, layer=layer, only=only)
    return with_new_names(table)


def from_env(environ: Mapping[str, str]) -> Table:
    """Read the environment: `MILES_MACHINE__GPUS=2`. An empty variable counts as unset."""
    table: Table = {}
    for variable, text in sorted(environ.items()):
        name = _key_of_variable(variable)
        if name is None or not text:
            continue
        section = name.split(".")[0]
        if name not in readable_keys() or section not in SETTINGS:
            if section not in SETTINGS and nearest_key(name) in keys():
                raise _hyperparameter(name, where=variable, remedy=f"unset {variable}", value=text)
            guess = nearest_key(name, within=SETTINGS)
            raise RecipeError(
                f"there is no key `{name}` in the sections machine and run",
                why=f"the environment sets {variable}={text}"
                + (f"; the nearest key is `{guess}`" if guess else ""),
                fix=f"unset {variable}"
                + (f"; export {_variable_of_key(guess)}={text}" if guess else ""),
            )
        if "__" not in variable:
            raise RecipeError(
                f"`{variable}` cannot be read as a key",
                why="two underscores must separate section and key",
                fix=f"unset {variable}; export {_variable_of_key(name)}={text}",
            )
        node = _parse_value(text, readable_keys()[name], source=variable)
        table[name] = KeyValue(
            value=node.value, text=text, origin=Origin(layer=SettingsLayer.ENV, where=variable)
        )
    return with_new_names(table)


def from_ray_environment(environ: Mapping[str, str]) -> Table:
    """Read RAY_ADDRESS, which names the cluster if nothing else does, as for Ray's own tools;
    `local` means none."""
    text = environ.get(RAY_VARIABLE, "")
    if text in ("", "local"):
        return {}
    return {
        "machine.address": KeyValue(
            value=text, text=text, origin=Origin(layer=SettingsLayer.ENV, where=RAY_VARIABLE)
        )
    }


def from_command_line(sets: Iterable[str], flags: Mapping[str, str]) -> Table:
    """Read `--set key=value` and flags (`{"machine.gpus": "--gpus 4"}`), which abbreviate
    it. Of several `--set` with one key the last counts."""
    table: Table = {}
    for name, option in flags.items():
        _add_override(table, name, option.partition(" ")[2], option=option)
    latest = {text.partition("=")[0].strip(): text for text in sets}
    for text in latest.values():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            guess = nearest_key(name.strip()) if name.strip() else None
            raise RecipeError(
                f"`--set {text}` is not a valid override",
                why="an override has the form KEY=VALUE",
                fix=_set_text(guess or "train.steps", value or "VALUE"),
            )
        _add_override(table, name.strip(), value.strip(), option=f"--set {text}")
    return with_new_names(table)


def merge(layers: Iterable[Table]) -> Table:
    """Merge the layers; later ones win. Setting a section to null removes what lower layers set
    inside it; an algorithm removes what another one set."""
    merged: Table = {}
    for table in layers:
        if ALGORITHM_KEY in table:
            by_another = [
                name
                for name, entry in merged.items()
                if entry.origin.layer is SettingsLayer.ALGORITHM
            ]
            for name in by_another:
                del merged[name]
        for name, entry in table.items():
            if name in sections():
                for inner in [key for key in merged if key.startswith(f"{name}.")]:
                    del merged[inner]
            parent = name.rpartition(".")[0]
            if parent in merged:
                del merged[parent]
            merged[name] = entry
    return merged


def _add_override(table: Table, name: str, text: str, *, option: str) -> None:
    origin = Origin(layer=SettingsLayer.SET, where=option)
    if name not in readable_keys() and name not in sections():
        raise unknown_key(name, where=f"`{option}`", fix=lambda guess: _set_text(guess, text))
    changes: Table = {}
    if name in sections():
        node = reader.read(text, source=f"`{option}`") if text not in NULL_TEXTS else _null()
        _flatten(
            node,
            name,
            changes,
            source=f"`{option}`",
            layer=SettingsLayer.SET,
            only=(),
            origin=origin,
        )
    else:
        node = _parse_value(text, readable_keys()[name], source=f"`{option}`")
        changes[name] = KeyValue(value=node.value, text=text, origin=origin)
    for key, entry in changes.items():
        _refuse_conflict(table, key, entry)
        table[key] = entry


def _set_text(name: str, text: str) -> str:
    """Return the option that sets the key to this text, as a shell reads it."""
    return f"--set {shlex.quote(f'{name}={text}')}"


def _refuse_conflict(table: Table, name: str, entry: KeyValue) -> None:
    rivals = [
        name,
        *([] if entry.value is not None else [key for key in table if key.startswith(f"{name}.")]),
    ]
    parent = name.rpartition(".")[0]
    if parent in table and table[parent].value is None:
        rivals.append(parent)
    for rival in rivals:
        if rival in table and (rival != name or table[rival].value != entry.value):
            raise RecipeError(
                f"`{name}` has two different values on one command line",
                why=f"`{table[rival].origin.where}` and `{entry.origin.where}` disagree, and "
                "neither takes precedence",
                fix=[f"keep {table[rival].origin.where}", f"keep {entry.origin.where}"],
            )


def _parse_value(text: str, key: RecipeKey, *, source: str) -> YamlNode:
    """Parse the value of a key. For a text key the text is used unchanged, so that it needs no YAML
    quotes; everything else is YAML."""
    if key.optional and text.strip() in NULL_TEXTS:
        return _null()
    is_yaml = (
        text[:1] in ("'", '"')
        or (key.takes_mapping and text[:1] == "{")
        or (key.takes_list and text[:1] == "[")
    )
    if key.is_text and not key.is_list and not is_yaml:
        return YamlNode(value=text, text=text, plain=True, line=1)
    try:
        node = reader.read(text, source=source)
    except RecipeError as error:
        raise RecipeError(
            f"the value in {source} cannot be parsed",
            why=f"`{text}` is not valid YAML ({error.why}); `{key.name}` expects {key.wants}",
            fix=_set_text(key.name, example(key)),
        ) from None
    if isinstance(node.value, dict) and not text.strip():
        return _null()
    return YamlNode(value=typed_value(node, key), text=text, plain=node.plain, line=1)


def _flatten(
    node: YamlNode,
    name: str,
    table: Table,
    *,
    source: str,
    layer: SettingsLayer,
    only: tuple[str, ...],
    origin: Origin | None = None,
) -> None:
    where = f"{source}:{node.line}" if origin is None else source
    said_by = origin or Origin(layer=layer, where=where)
    if name in readable_keys():
        table[name] = KeyValue(
            value=typed_value(node, readable_keys()[name]),
            text=node.text,
            origin=said_by,
            comment=node.comment,
        )
    elif name not in sections():
        raise unknown_key(
            name, where=where, fix=lambda guess: f"write `{guess}` at {where}", within=only
        )
    elif isinstance(node.value, dict):
        if not node.value and sections()[name].optional:
            table[name] = KeyValue(value={}, text=node.text, origin=said_by, comment=node.comment)
        for child, child_node in node.value.items():
            _refuse_dotted(child, child_node, where=where)
            _flatten(
                child_node,
                f"{name}.{child}",
                table,
                source=source,
                layer=layer,
                only=only,
                origin=origin,
            )
    elif node.value is not None:
        raise RecipeError(
            f"`{name}` is a section, not a value",
            why=f"{where} sets it to `{_short(node.text)}`; its keys are "
            + ", ".join(_children(name)),
            fix=f"miles help recipe   # then write the keys of `{name}` under it",
        )
    elif sections()[name].optional:
        table[name] = KeyValue(value=None, text=node.text, origin=said_by, comment=node.comment)


def _refuse_dotted(name: str, node: YamlNode, *, where: str) -> None:
    if "." in name:
        nested = ": {".join(name.split(".")) + f": {_short(node.text)}" + "}" * name.count(".")
        raise RecipeError(
            f"`{name}` uses dots, which YAML files do not support",
            why=f"{where}: in a file, keys are nested; the dotted form is only for `--set`",
            fix=f"write `{nested}`, or the same on several lines",
        )


def unknown_key(name: str, *, where: str, fix, within: tuple[str, ...] = ()) -> RecipeError:  # type: ignore[no-untyped-def]
    """Return the error for an unknown key. `fix` maps the nearest key to the advice."""
    guess = nearest_key(name, within=within)
    if guess and guess.rpartition(".")[0] == name:
        guess = None
    return RecipeError(
        f"there is no recipe key `{name}`",
        why=f"{where} sets it" + (f"; the nearest key is `{guess}`" if guess else ""),
        fix=[fix(guess), "miles help recipe   # lists every key"]
        if guess
        else "miles help recipe   # lists every key",
    )


def example(key: RecipeKey) -> str:
    """Return a valid value of the key, for advice."""
    if key.choices:
        return key.choices[0]
    if key.is_list:
        return "[TEXT]"
    if key.items:
        return f"{{NAME: {{{key.items[0].name}: TEXT}}}}"
    if key.default is None:
        return "true" if "true" in key.wants else key.number or "TEXT"
    return str(key.default).lower() if isinstance(key.default, bool) else str(key.default)


def _children(name: str) -> list[str]:
    depth = name.count(".") + 1
    return [
        key.rpartition(".")[2]
        for key in (*keys(), *sections())
        if key.startswith(f"{name}.") and key.count(".") == depth
    ]


def _hyperparameter(name: str, *, where: str, remedy: str, value: str = "VALUE") -> RecipeError:
    return RecipeError(
        f"`{name}` cannot be set here ({where})",
        why="the environment and user files may only set `machine` and `run`: everything that "
        "affects learning comes from the recipe and the command line, so that two people "
        "with the same recipe train the same model",
        fix=f"{remedy}, and set the key on the command line: --set "
        f"{name if '.' in name else name + '.KEY'}={value}",
    )


def _key_of_variable(variable: str) -> str | None:
    if not variable.startswith(ENV_PREFIX):
        return None
    rest = variable.removeprefix(ENV_PREFIX).lower()
    if "__" in rest:
        return rest.replace("__", ".")
    section, _, field = rest.partition("_")
    return f"{section}.{field}" if f"{section}.{field}" in keys() and section in SETTINGS else None


def _variable_of_key(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", "__")


def _null() -> YamlNode:
    return YamlNode(value=None, text="null", plain=True, line=1)


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_text(path: Path, *, what: str) -> str:
    """Read a text file. Raises RecipeError if it is unreadable."""
    try:
        return read_regular_text(path)
    except FileNotFoundError:
        raise RecipeError(
            f"{what} `{path}` does not exist",
            why="the file does not exist",
            fix="miles recipes   # lists the built-in recipes",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"{error.strerror}"
        )
        raise RecipeError(
            f"{what} `{path}` cannot be read", why=reason, fix=f"ls -l {path}; file {path}"
        ) from None
