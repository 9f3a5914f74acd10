"""Makes a LoadedRecipe from a recipe and its layers: it is checked, and knows where each value came
from. Called by the commands.

Never uses the machine's devices.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from milescli.core.errors import RecipeError, nearest
from milescli.core.units import decimal_product
from milescli.recipe import layers
from milescli.recipe.algorithms import with_algorithm
from milescli.recipe.check import check
from milescli.recipe.keys import SETTINGS, RecipeKey, keys, sections
from milescli.recipe.layers import KeyValue, Origin, SettingsLayer, Table, example
from milescli.recipe.schema import Recipe
from milescli.recipe.section import plain
from milescli.recipe.templates import find_recipe, templates_dir

QUERY_DEFAULTS: Mapping[str, object] = {
    "data.max_prompt_tokens": 2048,
    "eval.max_response_tokens": 2048,
}
"""Defaults for a model without a run: since nothing is trained, longer prompts and responses cost
little."""
BY_DEFAULT = "miles eval"
"""Origin of these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A checked recipe, with the origin of each value."""

    recipe: Recipe
    origins: dict[str, Origin]
    """Every key by its dotted name, in the order of the schema."""
    source: str
    """Name or path of the recipe as the user gave it: `quickstart`, or a path."""
    warnings: list[str] = field(default_factory=list)
    """Settings that are valid but probably not intended."""


def load(
    recipe: str,
    *,
    sets: Iterable[str] = (),
    flags: Mapping[str, str] | None = None,
    further: Table | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    home: Path,
) -> LoadedRecipe:
    """Read a template by name, or a .yaml file, and apply the layers above it. `sets` are texts of
    `--set`. `flags` are options that abbreviate one, `{"machine.gpus": "--gpus 4"}`; `further` is
    the rest of the command line. Raises RecipeError before any slow import."""
    path = find_recipe(recipe, cwd=cwd)
    base = layers.from_yaml(
        layers.read_text(path, what="recipe"),
        source=_shown(path, cwd, home),
        layer=SettingsLayer.RECIPE,
    )
    user_files = _user_files(environ=environ, cwd=cwd, home=home, but_not=path)
    words = layers.from_command_line(sets, flags or {}) | (further or {})
    table = _with_one_length(_layered(base, user_files, environ, words))
    if "name" not in table:
        origin = Origin(layer=SettingsLayer.RECIPE, where=_shown(path, cwd, home))
        table["name"] = KeyValue(value=path.stem, text=path.stem, origin=origin)
    return build(table, source=recipe)


def load_model(
    model: str,
    *,
    prompts: str,
    sets: Iterable[str] = (),
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    home: Path,
) -> LoadedRecipe:
    """Return the recipe of a model that is only queried: defaults, with the layers above them.
    `prompts` becomes `data.prompts`. Raises as `load` does."""
    values: dict[str, object] = {
        "name": "evaluation",
        "model.path": model,
        "data.prompts": prompts,
        **QUERY_DEFAULTS,
    }
    origin = Origin(layer=SettingsLayer.RECIPE, where=BY_DEFAULT)
    base = {
        name: KeyValue(value=value, text=str(value), origin=origin)
        for name, value in values.items()
    }
    user_files = _user_files(environ=environ, cwd=cwd, home=home, but_not=None)
    table = _layered(base, user_files, environ, layers.from_command_line(sets, flags or {}))
    bound = table.get("eval.max_response_tokens")
    if bound is not None and bound.origin == origin and "rollout.max_response_tokens" in table:
        del table["eval.max_response_tokens"]  # who bounds responses means these
    return build(table, source=model)


def _layered(
    base: Table, user_files: Iterable[Table], environ: Mapping[str, str], words: Table
) -> Table:
    """Merge the recipe's own values with the layers above them; `words` is the layer of the command
    line."""
    return layers.merge(
        [
            layers.from_ray_environment(environ),
            with_algorithm(base),
            *user_files,
            layers.from_env(environ),
            with_algorithm(words),
        ]
    )


def _with_one_length(table: Table) -> Table:
    """Leave out `train.steps` or `train.epochs` if the other is of a stronger layer. Raises
    RecipeError if both are of the same one."""
    steps, epochs = table.get("train.steps"), table.get("train.epochs")
    if steps is None or epochs is None or epochs.value is None:
        return table
    if steps.origin.layer is epochs.origin.layer:
        raise RecipeError(
            "the recipe sets the length of the training twice",
            why=f"`train.epochs` is {epochs.text} ({epochs.origin}), and `train.steps` is "
            f"{steps.text} ({steps.origin})",
            fix="--set train.epochs=null   # the steps are the length",
        )
    order = list(SettingsLayer)
    is_of_epochs = order.index(epochs.origin.layer) > order.index(steps.origin.layer)
    weaker = "train.steps" if is_of_epochs else "train.epochs"
    return {name: entry for name, entry in table.items() if name != weaker}


def override(
    loaded: LoadedRecipe,
    *,
    sets: Iterable[str],
    flags: Mapping[str, str] | None = None,
    only: tuple[str, ...],
    environ: Mapping[str, str] | None = None,
) -> LoadedRecipe:
    """Return the recipe with some values changed, as `miles resume` does. `only` lists keys or
    sections that may change. `environ` is read again if RAY_ADDRESS named the cluster before."""
    typed = layers.from_command_line(sets, flags or {})
    for name, entry in typed.items():
        if not any(name == part or name.startswith(f"{part}.") for part in only):
            option, _, value = entry.origin.where.partition(" ")
            raise RecipeError(
                f"`{name}` cannot change during a run",
                why=f"changing `{entry.origin.where}` would make the rest of the run a different "
                f"experiment; only {', '.join(only)} may change",
                fix=f"miles launch --recipe {loaded.source} --name NEW {option} "
                f"{shlex.quote(value)}   # a new run",
            )
    table = table_of(loaded)
    if loaded.origins["machine.address"].where in ("", layers.RAY_VARIABLE):
        del table["machine.address"]
    return build(
        layers.merge([layers.from_ray_environment(environ or {}), table, with_algorithm(typed)]),
        source=loaded.source,
    )


def runs_dir(*, environ: Mapping[str, str], cwd: Path, home: Path) -> Path:
    """Return the folder of runs when there is no recipe: `run.dir` of the environment, the user
    files, or the default."""
    tables = [
        *_user_files(environ=environ, cwd=cwd, home=home, but_not=None),
        layers.from_env(environ),
    ]
    entry = layers.merge(tables).get("run.dir")
    return cwd / Path(str(entry.value if entry else keys()["run.dir"].default)).expanduser()


def validate(table: Table) -> Recipe:
    """Make a recipe whose values have the right types, but may contradict each other. Raises
    RecipeError."""
    nested: dict[str, object] = {}
    for name, entry in table.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})  # type: ignore[assignment]
        place[last] = entry.value
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        raise explain(error, table) from None


def build(table: Table, *, source: str) -> LoadedRecipe:
    """Make a checked recipe, with origins, from a table. Raises RecipeError."""
    recipe = validate(table)
    default = Origin(layer=SettingsLayer.DEFAULT)
    origins = {
        name: table[name].origin if name in table else _section_origin(name, table) or default
        for name in keys()
    }
    warnings = check(recipe, origins)
    return LoadedRecipe(recipe=recipe, origins=origins, source=source, warnings=warnings)


def value_at(recipe: Recipe, name: str) -> object:
    """Return the value of a dotted key; None inside a section that is null."""
    place: object = recipe
    for part in name.split("."):
        place = getattr(place, part, None) if place is not None else None
    return place


def values_of(recipe: Recipe) -> dict[str, object]:
    """Return every key by its dotted name as JSON values. Recipes name variables, so they hold no
    secrets."""
    return {name: plain(value_at(recipe, name)) for name in keys()}


def _section_origin(name: str, table: Table) -> Origin | None:
    parent = name.rpartition(".")[0]
    return table[parent].origin if parent in table else None


def _user_files(
    *, environ: Mapping[str, str], cwd: Path, home: Path, but_not: Path | None
) -> list[Table]:
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    paths = [config / "miles" / "config.yaml", cwd / "miles.yaml"]
    return [
        layers.from_yaml(
            layers.read_text(path, what="user file"),
            source=_shown(path, cwd, home),
            layer=SettingsLayer.FILE,
            only=SETTINGS,
        )
        for path in paths
        if _may_exist(path) and (but_not is None or path.resolve() != but_not.resolve())
    ]


def _may_exist(path: Path) -> bool:
    """Return True if the file exists, and also if its folder is not accessible: reading it then
    raises the error."""
    try:
        return path.is_file()
    except PermissionError:
        return True


def _shown(path: Path, cwd: Path, home: Path) -> str:
    """Return the shortest clear form of a path; for a template only its name."""
    path = path.resolve()
    if path.parent == templates_dir().resolve():
        return path.name
    for base, prefix in ((cwd.resolve(), ""), (home.resolve(), "~/")):
        if path.is_relative_to(base):
            return prefix + str(path.relative_to(base))
    return str(path)


def table_of(loaded: LoadedRecipe) -> Table:
    """Return every value with its origin."""
    table: Table = {}
    for name, origin in loaded.origins.items():
        parent = name.rpartition(".")[0]
        if (
            parent in sections()
            and sections()[parent].optional
            and value_at(loaded.recipe, parent) is None
        ):
            continue
        value = value_at(loaded.recipe, name)
        table[name] = KeyValue(value=value, text=str(value), origin=origin)
    return table


def explain(error: ValidationError, table: Table) -> RecipeError:
    """Return an error with the first problem in full, and the names of the other keys."""
    places = [item["loc"] for item in error.errors(include_url=False)]
    names = list(dict.fromkeys(_key_of(place) for place in places))
    entry, key = table[names[0]], keys()[names[0]]
    others = (
        f"; also wrong: {', '.join(f'`{name}`' for name in names[1:])}" if len(names) > 1 else ""
    )
    shown = f"`{entry.text}`" if entry.text else "nothing"
    return RecipeError(
        f"`{key.name}` cannot be {shown}",
        why=f"it must be {key.wants}; {_place(entry)} sets it to "
        f"{shown}{_within(key, places[0])}{others}",
        fix=_fix(key, entry),
    )


def _key_of(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in keys():
            return ".".join(parts[:end])
    raise AssertionError(f"the schema rejected a place that is not a key: {location}")


def _within(key: RecipeKey, location: tuple[int | str, ...]) -> str:
    """Return where in a list of mappings, or a mapping of them, the problem is: `, of which number
    2 has a wrong weight`."""
    inner = [part for part in location if part not in ("str", "list[str]")]
    inner = inner[key.name.count(".") + 1 :]
    if not key.items or not inner:
        return ""
    which = f"number {inner[0] + 1}" if isinstance(inner[0], int) else f"`{inner[0]}`"
    if len(inner) == 1:
        return f", of which {which} is not a mapping"
    known = {item.name: f" ({item.wants})" for item in key.items}
    dotted = [".".join(map(str, inner[1:end])) for end in range(len(inner), 1, -1)]
    name = next((name for name in dotted if name in known), dotted[0])
    unknown = "" if name in known else "the unknown key "
    return f", of which {which} is wrong in {unknown}`{name}`{known.get(name, '')}"


def _place(entry: KeyValue) -> str:
    return (
        f"`{entry.origin.where}`" if entry.origin.layer is SettingsLayer.SET else entry.origin.where
    )


def _fix(key: RecipeKey, entry: KeyValue) -> str:
    better = _better_value(key, entry)
    if entry.origin.layer is SettingsLayer.SET:
        is_quoted = key.is_list or key.items
        return f"--set '{key.name}={better}'" if is_quoted else f"--set {key.name}={better}"
    if entry.origin.layer is SettingsLayer.ENV:
        return f"export {entry.origin.where}={better}"
    return f"write `{key.name.rpartition('.')[2]}: {better}` at {entry.origin.where}"


def _better_value(key: RecipeKey, entry: KeyValue) -> str:
    if key.choices:
        return nearest(entry.text, key.choices) or key.choices[0]
    if key.is_list and isinstance(entry.value, str):
        return f"[{entry.text}]"
    bare = entry.text.strip("\"'")
    is_quoted_number = entry.text != bare and bare.replace(".", "", 1).isdigit()
    return bare if is_quoted_number else example(key)


def with_steps(loaded: LoadedRecipe, num_rows: int) -> LoadedRecipe:
    """Set `train.steps` from `train.epochs`, if given, in its place: a resumed run has its steps.
    Raises RecipeError if the steps contradict the rest."""
    train = loaded.recipe.train
    if train.epochs is None:
        return loaded
    steps = max(1, math.ceil(decimal_product(num_rows, train.epochs) / train.batch_size))
    recipe = loaded.recipe.model_copy(
        update={"train": train.model_copy(update={"steps": steps, "epochs": None})}
    )
    origins = {**loaded.origins, "train.steps": loaded.origins["train.epochs"]}
    return replace(loaded, recipe=recipe, origins=origins, warnings=check(recipe, origins))
